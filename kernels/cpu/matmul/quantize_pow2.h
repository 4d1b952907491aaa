// Activations to int8 codes times a power of two per 32: as blocks, for GEMV, and the same numbers as bf16
// tiles (tables/kernel_table.h), for GEMM with MXFP4 weights.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/bf16_tile_order.h"
#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// The smallest power of two that makes the largest of 32 values at most 127, and its inverse. 127.5 / 64 and
// more would round to 128. Below 2^-60 it is zero; a NaN or an infinity stays one.
struct Pow2Scale {
  float scale, inverse;
};
inline Pow2Scale pow2_scale(V16 low, V16 high) {
  const float amax = Simd::reduce_max(Simd::max(Simd::abs(low), Simd::abs(high)));
  uint32_t bits;
  __builtin_memcpy(&bits, &amax, 4);
  bits = (bits + 0x00010000) & 0x7f800000;
  float power;
  __builtin_memcpy(&power, &bits, 4);
  if (amax < 0x1p-60f) return {0.0f, 0.0f};
  return {power * 0x1p-6f, 64.0f / power};
}

void quantize_pow2(const float* x, int64_t cols, ActivationBlock* out) {
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, x += kQuantBlock) {
    const V16 low = Simd::load(x), high = Simd::load(x + kLanes);
    const Pow2Scale s = pow2_scale(low, high);
    const V16 inverse = Simd::broadcast(s.inverse);
    out[b].scale = s.scale;
    const int32_t first = Simd::round_to_int8(Simd::mul(low, inverse), out[b].q);
    out[b].sum = first + Simd::round_to_int8(Simd::mul(high, inverse), out[b].q + kLanes);
  }
}

// Codes times their scale, as places of a row of a tile. They are exact in bf16, so that the upper half of a
// float is one.
[[gnu::always_inline]] inline V tile_places(V16 low, V16 high, V16 inverse, V16 scale, V order) {
  const auto rounded = [&](V16 v) __attribute__((always_inline)) {
    const V codes = _mm512_cvtps_epi32(Simd::mul(v, inverse));
    return _mm512_castps_si512(Simd::mul(_mm512_cvtepi32_ps(codes), scale));
  };
  const V both = blend_bits(_mm512_srli_epi32(rounded(low), 16), rounded(high), 0xffff0000ffff0000);
  return _mm512_permutexvar_epi16(order, both);
}

// The numbers of quantize_pow2, code * scale, as a row of tiles, those of a group of `height` rows.
void quantize_bf16_tile(const float* x, int64_t cols, uint16_t* to, int64_t height) {
  const V order = load_bytes(kTileOrder.word);
  for (int64_t c = 0; c < cols; c += kQuantBlock, to += height * kQuantBlock) {
    const V16 low = Simd::load(x + c), high = Simd::load(x + c + kLanes);
    const Pow2Scale s = pow2_scale(low, high);
    _mm512_storeu_si512(to,
                        tile_places(low, high, Simd::broadcast(s.inverse), Simd::broadcast(s.scale), order));
  }
}

// The scales of sixteen rows of 32 values, as pow2_scale gives them, and their inverses. Those of row r lie
// at scale_place(r).
constexpr int scale_place(int r) { return (r / 4 == 1 ? 8 : r / 4 == 2 ? 4 : r / 4 * 4) + r % 4; }
struct alignas(64) GroupScales {
  float scale[16], inverse[16];
};
[[gnu::always_inline]] inline void group_scales(const float* const* rows, int64_t c, GroupScales& out) {
  const V magnitude = _mm512_set1_epi32(0x7fffffff);
  V amax[16];  // as integers: the same order, and a NaN is above all numbers
  unroll<16>([&](auto r) {
    amax[r] = _mm512_max_epu32(_mm512_and_si512(load_bytes(rows[r] + c), magnitude),
                               _mm512_and_si512(load_bytes(rows[r] + c + kLanes), magnitude));
  });
  unroll<8>([&](auto i) {  // quarters: row i twice, row i + 8 twice
    amax[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(amax[i], amax[i + 8], 0x44),
                               _mm512_shuffle_i32x4(amax[i], amax[i + 8], 0xee));
  });
  unroll<4>([&](auto i) {  // rows i, i + 8, i + 4, i + 12
    amax[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(amax[i], amax[i + 4], 0x88),
                               _mm512_shuffle_i32x4(amax[i], amax[i + 4], 0xdd));
  });
  unroll<2>([&](auto i) {  // of each quarter: rows 2 i, 2 i + 1, again
    amax[i + 4] = _mm512_max_epu32(_mm512_unpacklo_epi32(amax[2 * i], amax[2 * i + 1]),
                                   _mm512_unpackhi_epi32(amax[2 * i], amax[2 * i + 1]));
  });
  const V all =
      _mm512_max_epu32(_mm512_unpacklo_epi64(amax[4], amax[5]), _mm512_unpackhi_epi64(amax[4], amax[5]));
  const V power =
      _mm512_and_si512(_mm512_add_epi32(all, _mm512_set1_epi32(0x00010000)), _mm512_set1_epi32(0x7f800000));
  const __mmask16 some = _mm512_cmpge_epu32_mask(all, _mm512_set1_epi32(0x21800000));  // 2^-60
  const V16 p = _mm512_castsi512_ps(power);
  Simd::store(out.scale, _mm512_maskz_mul_ps(some, p, Simd::broadcast(0x1p-6f)));
  Simd::store(out.inverse, _mm512_maskz_div_ps(some, Simd::broadcast(64.0f), p));
}

// What quantize_bf16_tile makes of `height` rows [cols], a group: their scales are found together.
void quantize_bf16_tile_group(const float* const* rows, int64_t height, int64_t cols, uint16_t* to) {
  if (height < kTileHeight / 2) {
    for (int64_t r = 0; r < height; ++r) quantize_bf16_tile(rows[r], cols, to + r * kQuantBlock, height);
    return;
  }
  const V order = load_bytes(kTileOrder.word);
  const float* all[kTileHeight];
  for (int64_t r = 0; r < kTileHeight; ++r) all[r] = rows[r < height ? r : height - 1];
  for (int64_t c = 0; c < cols; c += kQuantBlock, to += height * kQuantBlock) {
    GroupScales of;
    group_scales(all, c, of);
    for (int64_t r = 0; r < height; ++r) {
      const auto place = scale_place(static_cast<int>(r));
      _mm512_storeu_si512(
          to + r * kQuantBlock,
          tile_places(Simd::load(rows[r] + c), Simd::load(rows[r] + c + kLanes),
                      Simd::broadcast(of.inverse[place]), Simd::broadcast(of.scale[place]), order));
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
