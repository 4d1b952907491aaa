// Kernels for x86 with AVX-512 (F, BW, VL, VNNI, VBMI), and the same with AMX tiles: int8 for products with
// many rows, bf16 for MXFP4 and attention; compiled with all their flags, for compilers use tiles only where
// told (simd/target.h).
#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/attention/flash_amx.h"
#include "kernels/cpu/attention/flash_backward.h"
#include "kernels/cpu/attention/flash_forward.h"
#include "kernels/cpu/attention/paged_amx.h"
#include "kernels/cpu/matmul/gemm_amx_bf16.h"
#include "kernels/cpu/matmul/gemm_amx_int8.h"
#include "kernels/cpu/matmul/quantize_pow2.h"
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {
namespace avx512 {
namespace {

template <class F>
constexpr void put_tiles(KernelTable& table, Format format) {
  table.matmul[static_cast<int>(format)] = amx_int8_matmul<F>;
  table.int8_tile_matmul[static_cast<int>(format)] = amx_int8_tile_matmul<F>;
}

constexpr KernelTable make_amx_table() {
  KernelTable table = make_avx512_table("amx");
  put_tiles<FormatQ8_0>(table, Format::kQ8_0);
  put_tiles<FormatQ4_0>(table, Format::kQ4_0);
  put_tiles<FormatQ4_1>(table, Format::kQ4_1);
  put_tiles<FormatQ5_0>(table, Format::kQ5_0);
  put_tiles<FormatQ5_1>(table, Format::kQ5_1);
  put_tiles<FormatQ4_K>(table, Format::kQ4_K);
  put_tiles<FormatQ5_K>(table, Format::kQ5_K);
  put_tiles<FormatQ6_K>(table, Format::kQ6_K);
  put_tiles<FormatQ4_Z>(table, Format::kQ4_Z);
  table.quantize_int8_tile = quantize_int8_tile;
  table.matmul[static_cast<int>(Format::kMXFP4)] = amx_int8_matmul<FormatMXFP4>;
  table.matmul[static_cast<int>(Format::kMXFP4Split)] = amx_int8_matmul<FormatMXFP4Split>;
  table.bf16_tile_matmul[static_cast<int>(Format::kMXFP4)] = amx_bf16_matmul<FormatMXFP4>;
  table.bf16_tile_matmul[static_cast<int>(Format::kMXFP4Split)] = amx_bf16_matmul<FormatMXFP4Split>;
  table.attention[static_cast<int>(KvType::kBF16)] = attend_amx;
  table.flash_forward = flash_by_tiles<flash_forward<FlashAmx>, flash_forward<FlashFloat>>;
  table.flash_backward_queries =
      flash_by_tiles<flash_backward_queries<FlashAmx>, flash_backward_queries<FlashFloat>>;
  table.flash_backward_keys = flash_by_tiles<flash_backward_keys<FlashAmx>, flash_backward_keys<FlashFloat>>;
  constexpr KvType kByTwos[] = {KvType::kF32, KvType::kF16, KvType::kBF16, KvType::kFp8};
  for (const KvType type : kByTwos) table.set_heads_per_split(type, 2);
  table.quantize_pow2 = quantize_pow2;
  table.quantize_bf16_tile = quantize_bf16_tile;
  table.quantize_bf16_tile_group = quantize_bf16_tile_group;
  return table;
}

}  // namespace
}  // namespace avx512

const KernelTable kAvx512Table = avx512::make_avx512_table("avx512");
const KernelTable kAmxTable = avx512::make_amx_table();

}  // namespace millrace::cpu
