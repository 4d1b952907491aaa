// Products of plain matrices and of four-bit weights by AMX tiles.
#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/matmul/dense_amx.h"
#include "kernels/cpu/tables/isa_parts.h"

namespace millrace::cpu::avx512 {

void put_tile_dense(KernelTable& table) {
  static constexpr DenseTileKernels kKernels = make_dense_tile_kernels();
  table.dense_tiles = &kKernels;
}

}  // namespace millrace::cpu::avx512
