// Kernels for plain C++: runs everywhere. Everything is in the anonymous
// namespace and no STL is used: an inline function compiled with these flags must not be picked by the linker
// for other files.

#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/tables.h"
#include "quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "backend/cpu/simd_scalar.h"
//
#include "backend/cpu/kernels_unroll.h"
//
#include "backend/cpu/kernels_formats.h"
//
#include "backend/cpu/kernels_quantized.h"
//
#include "backend/cpu/kernels_float.h"
//
#include "backend/cpu/kernels_attention.h"
//
#include "backend/cpu/kernels_table.h"

}  // namespace

constexpr KernelTable make_scalar_table() {
  KernelTable table = make_table("scalar");
  // As the widest table, so that every machine tests it.
  table.attend_together(KvType::kBF16, 2);
  table.attend_together(KvType::kInt8, 4);
  return table;
}
const KernelTable kScalarTable = make_scalar_table();

}  // namespace millrace::cpu
