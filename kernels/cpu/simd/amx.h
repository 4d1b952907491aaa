// What the kernels with AMX tiles share: the configuration of the tile unit, and the order of stores and tile
// loads.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/avx512.h"
#if !defined(MILLRACE_HAS_AVX512_VBMI)
#error "every processor with tiles has VBMI: define MILLRACE_TARGET_AVX512 before the first include"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// As _tile_loadconfig reads it. The defaults are those of int8 products (matmul/gemm_amx_int8.h): tiles 0 to
// 3 are sums [16][16] int32, 4 activations [16][32], 5 weights [8][16][4].
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 8};
};
static_assert(sizeof(TileConfig) == 64);

// The compiler does not know that tile loads read memory.
inline void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
