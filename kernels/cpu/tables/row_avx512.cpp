// Rows of floats with VBMI, by which numbers are narrowed to bf16 in one operation.
#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/tables/row_kernels.h"
