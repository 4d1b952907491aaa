// Kernels in plain C++: they run everywhere (simd/target.h).
#include "kernels/cpu/tables/dense_kernels.h"
#include "kernels/cpu/tables/flash_kernels.h"
#include "kernels/cpu/tables/int8_kernels.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/paged_kernels.h"
#include "kernels/cpu/tables/row_kernels.h"
