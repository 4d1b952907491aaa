// Products by AMX tiles: int8 with many rows, bf16 for MXFP4. Compilers use tiles only where told, so the
// flags are those of AVX-512 and tiles (simd/target.h).
#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/matmul/gathered_scales.h"
#include "kernels/cpu/matmul/gemm_amx_bf16.h"
#include "kernels/cpu/matmul/gemm_amx_int8.h"
#include "kernels/cpu/matmul/gemv_interleaved_x86.h"
#include "kernels/cpu/matmul/quantize_pow2.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu::avx512 {
namespace {

// Of few rows: by vectors.
template <Format kFormat>
void multiply_few(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                  float* out, int64_t out_stride) {
  avx512_table().matmul[static_cast<int>(kFormat)](w, first, num_rows, x, num_m, out, out_stride);
}

template <class F, Format kFormat>
void put_int8_tiles(KernelTable& table) {
  table.matmul[static_cast<int>(kFormat)] = amx_int8_matmul<F, multiply_few<kFormat>>;
  table.int8_tile_matmul[static_cast<int>(kFormat)] = amx_int8_tile_matmul<F>;
}
// The same with scales that are gathered.
template <class F, Format kFormat>
void put_int8_tiles_gathered(KernelTable& table) {
  put_int8_tiles<F, kFormat>(table);
  table.matmul[static_cast<int>(kFormat)] = amx_int8_matmul<F, gemv<GatheredScales<F>>>;
}
template <class F, Format kFormat>
void put_bf16_tiles(KernelTable& table) {
  table.matmul[static_cast<int>(kFormat)] = amx_int8_matmul<F, multiply_few<kFormat>>;
  table.bf16_tile_matmul[static_cast<int>(kFormat)] = amx_bf16_matmul<F>;
}

}  // namespace

void put_tile_products(KernelTable& table) {
  put_int8_tiles_gathered<FormatQ8_0, Format::kQ8_0>(table);
  put_int8_tiles_gathered<FormatQ4_0, Format::kQ4_0>(table);
  put_int8_tiles_gathered<FormatQ4_1, Format::kQ4_1>(table);
  put_int8_tiles<FormatQ5_0, Format::kQ5_0>(table);
  put_int8_tiles<FormatQ5_1, Format::kQ5_1>(table);
  put_int8_tiles<FormatQ4_K, Format::kQ4_K>(table);
  put_int8_tiles<FormatQ5_K, Format::kQ5_K>(table);
  put_int8_tiles<FormatQ6_K, Format::kQ6_K>(table);
  put_int8_tiles<FormatQ4_Z, Format::kQ4_Z>(table);
  put_int8_tiles<Interleaved<FormatQ8_0>, Format::kInterleavedQ8_0>(table);
  put_int8_tiles<Interleaved<FormatQ4_0>, Format::kInterleavedQ4_0>(table);
  put_int8_tiles<Interleaved<FormatQ4_1>, Format::kInterleavedQ4_1>(table);
  put_int8_tiles<Interleaved<FormatQ5_0>, Format::kInterleavedQ5_0>(table);
  put_int8_tiles<Interleaved<FormatQ5_1>, Format::kInterleavedQ5_1>(table);
  put_int8_tiles<Interleaved<FormatQ4_K>, Format::kInterleavedQ4_K>(table);
  put_int8_tiles<Interleaved<FormatQ5_K>, Format::kInterleavedQ5_K>(table);
  put_int8_tiles<Interleaved<FormatQ6_K>, Format::kInterleavedQ6_K>(table);
  put_int8_tiles<Interleaved<FormatQ4_Z>, Format::kInterleavedQ4_Z>(table);
  put_bf16_tiles<FormatMXFP4, Format::kMXFP4>(table);
  table.matmul[static_cast<int>(Format::kInterleavedMXFP4)] = nullptr;  // tiles would have to read them too
  put_bf16_tiles<FormatMXFP4Split, Format::kMXFP4Split>(table);
  table.quantize_int8_tile = quantize_int8_tile;
  table.quantize_pow2 = quantize_pow2;
  table.quantize_bf16_tile = quantize_bf16_tile;
  table.quantize_bf16_tile_group = quantize_bf16_tile_group;
}

}  // namespace millrace::cpu::avx512
