// Kernels for x86 with AVX-512 (F, BW, VL, VNNI, VBMI), and the same with AMX tiles: int8 for products with
// many rows, bf16 for MXFP4; compiled with all their flags, for compilers use tiles only where told.
// Everything is in the anonymous namespace and no STL is used: an inline function compiled with these flags
// must not be picked by the linker for other files.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/tables.h"
#include "quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "backend/cpu/simd_avx512.h"
//
#include "backend/cpu/kernels_unroll.h"
//
using V16 = Simd::V16;
#include "backend/cpu/kernels_wide_formats.h"
//
#include "backend/cpu/kernels_wide_few.h"
//
#include "backend/cpu/kernels_wide_packed.h"
//
#include "backend/cpu/kernels_amx.h"
//
#include "backend/cpu/kernels_amx_bf16.h"
//
#include "backend/cpu/kernels_float.h"
//
#include "backend/cpu/kernels_attention.h"
//
#include "backend/cpu/kernels_table.h"

constexpr KernelTable make_wide_table(const char* name) {
  KernelTable table = make_table(name);
  table.pass_rows = 1 << 20;  // all there are
  return table;
}

constexpr KernelTable make_amx_table() {
  KernelTable table = make_wide_table("amx");
  const auto put = [&](Format format, MatmulFn kernel) { table.matmul[static_cast<int>(format)] = kernel; };
  put(Format::kQ8_0, tile_matmul<FormatQ8_0>);
  put(Format::kQ4_0, tile_matmul<FormatQ4_0>);
  put(Format::kQ4_1, tile_matmul<FormatQ4_1>);
  put(Format::kQ5_0, tile_matmul<FormatQ5_0>);
  put(Format::kQ5_1, tile_matmul<FormatQ5_1>);
  put(Format::kQ4_K, tile_matmul<FormatQ4_K>);
  put(Format::kQ5_K, tile_matmul<FormatQ5_K>);
  put(Format::kQ6_K, tile_matmul<FormatQ6_K>);
  put(Format::kMXFP4, tile_matmul<FormatMXFP4>);
  put(Format::kMXFP4Split, tile_matmul<FormatMXFP4Split>);
  put(Format::kQ4_Z, tile_matmul<FormatQ4_Z>);
  table.tile_matmul[static_cast<int>(Format::kMXFP4)] = bf16_matmul<FormatMXFP4>;
  table.tile_matmul[static_cast<int>(Format::kMXFP4Split)] = bf16_matmul<FormatMXFP4Split>;
  table.quantize_binary = quantize_binary;
  table.to_tiles = to_tiles;
  return table;
}

}  // namespace

const KernelTable kAvx512Table = make_wide_table("avx512");
const KernelTable kAmxTable = make_amx_table();

}  // namespace millrace::cpu
