// Kernels for plain C++: runs everywhere. Everything is in the anonymous
// namespace and no STL is used: an inline function compiled with these flags must not be picked by the linker
// for other files.

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/tables/isa_tables.h"
#include "kernels/cpu/tables/kernel_table.h"
#include "kernels/quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "kernels/cpu/simd/scalar.h"
//
#include "kernels/cpu/simd/unroll.h"
//
#include "kernels/cpu/matmul/formats.h"
//
#include "kernels/cpu/matmul/quantized.h"
//
#include "kernels/cpu/matmul/float.h"
//
#include "kernels/cpu/attention/paged.h"
//
#include "kernels/cpu/tables/instantiate.h"

}  // namespace

constexpr KernelTable make_scalar_table() {
  KernelTable table = make_table("scalar");
  // As the widest table, so that every machine tests it.
  table.set_heads_per_split(KvType::kBF16, 2);
  table.set_heads_per_split(KvType::kInt8, 4);
  return table;
}
const KernelTable kScalarTable = make_scalar_table();

}  // namespace millrace::cpu
