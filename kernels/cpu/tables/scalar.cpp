// Kernels in plain C++: they run everywhere (simd/target.h).
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

namespace {

constexpr KernelTable make_scalar_table() {
  KernelTable table = scalar::make_table("scalar");
  // As the table with the most heads at a time, so that every machine tests it.
  table.set_heads_per_split(KvType::kBF16, 2);
  table.set_heads_per_split(KvType::kInt8, 4);
  return table;
}

}  // namespace

const KernelTable kScalarTable = make_scalar_table();

}  // namespace millrace::cpu
