// Attention over bf16 tensors by bf16 tiles of the AMX unit: the same tiles of 64 lanes by 64 rows as in
// float32 (flash_rows.h), with other products. Weights of softmax, and dS, are rounded to bf16; sums are
// float32. Bits of its own, the same for any neighbours and number of threads.
//
//     scores       A: rows as they lie [16 rows][32 dims]            B: lanes in pairs [16 pairs of
//     dims][16][2] accumulate   A: rows transposed  [16 dims][32 rows]            B: weights in pairs [16
//     pairs of rows][16][2]
//
// A step is 32 x 32 outputs: tiles 0 to 3 are sums, 4 and 5 A, 6 and 7 B, a load for every product. Rows are
// transposed a pair of them at a time, so that a 16 x 16 transpose of words gives 16 dims of 32 rows.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/attention/flash_rows.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline constexpr int32_t kFlashStep = 32;              // rows, lanes, dims: what two tiles cover
inline constexpr int64_t kLaneBytes = 4 * kFlashTile;  // a row of float sums, or of pairs of bf16

inline int32_t whole_steps(int32_t count) { return (count + kFlashStep - 1) / kFlashStep * kFlashStep; }

// words[i][j] -> words[j][i]
[[gnu::always_inline]] inline void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  unroll<8>([&](auto i) __attribute__((always_inline)) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  });
  unroll<4>([&](auto i) __attribute__((always_inline)) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  });
  // r[4 g + c] has, in its quarter q, column 4 q + c of rows 4 g to 4 g + 3.
  unroll<4>([&](auto c) __attribute__((always_inline)) {
    const __m512i low02 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i low13 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i high02 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i high13 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  });
  unroll<16>([&](auto i) __attribute__((always_inline)) { r[i] = t[i]; });
}

// rows [whole steps][dims] bf16 -> [dims][64] bf16
inline void transpose_rows(const uint16_t* rows, int32_t count, int32_t dims, uint16_t* to) {
  for (int32_t row = 0; row < count; row += kFlashStep) {
    for (int32_t d = 0; d < dims; d += kLanes) {
      __m512i pairs[16];
      unroll<16>([&](auto i) __attribute__((always_inline)) {
        const uint16_t* const at = rows + int64_t{row + 2 * i} * dims + d;
        const __m512i even = _mm512_cvtepu16_epi32(Simd::load256(at));
        const __m512i odd = _mm512_cvtepu16_epi32(Simd::load256(at + dims));
        pairs[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      });
      transpose_words(pairs);
      unroll<16>([&](auto i) __attribute__((always_inline)) {
        _mm512_storeu_si512(to + int64_t{d + i} * kFlashTile + row, pairs[i]);
      });
    }
  }
}

[[gnu::always_inline]] inline __m512i rounded_bf16(const float* at) {  // in the upper halves
  const __m512i u = _mm512_castps_si512(_mm512_loadu_ps(at));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
}

// by [count][64] floats -> pairs of rows [whole steps / 2][64][2] bf16 in the same place: pair i takes the
// place of row i, which was read before. Rows behind the last are zero.
inline void pair_weights(float* by, int32_t count, int32_t lanes) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int32_t pair = 0; 2 * pair < whole_steps(count); ++pair) {
    for (int32_t lane = 0; lane < lanes; lane += kLanes) {
      const float* const from = by + 2 * pair * kFlashTile + lane;
      const __m512i zero = _mm512_setzero_si512();
      const __m512i even = 2 * pair < count ? rounded_bf16(from) : zero;
      const __m512i odd = 2 * pair + 1 < count ? rounded_bf16(from + kFlashTile) : zero;
      const __m512i both = _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, upper));
      _mm512_storeu_si512(by + pair * kFlashTile + lane, both);
    }
  }
}

struct FlashAmx {
  static void load_rows(const FlashRows& of, int32_t first, int32_t count, int32_t head, int32_t dims,
                        float* to) {
    auto* const rows = reinterpret_cast<uint16_t*>(to);
    const size_t bytes = static_cast<size_t>(dims) * 2;
    for (int32_t r = 0; r < count; ++r)
      __builtin_memcpy(rows + int64_t{r} * dims, of.at(first + r, head), bytes);
    for (int32_t r = count; r < whole_steps(count); ++r) __builtin_memset(rows + int64_t{r} * dims, 0, bytes);
  }

  template <class At>
  static void load_lanes(const FlashRows& of, int32_t count, int32_t dims, float*, float* to, const At& at) {
    auto* const pairs = reinterpret_cast<uint32_t*>(to);
    for (int32_t r = 0; r < whole_steps(count); ++r) {
      const uint8_t* const row = r < count ? of.at(at(r).row, at(r).head) : nullptr;
      for (int32_t d = 0; d < dims / 2; ++d) {
        uint32_t pair = 0;
        if (row != nullptr) __builtin_memcpy(&pair, row + 4 * d, 4);
        pairs[d * kFlashTile + r] = pair;
      }
    }
  }

  // 32 x 32 outputs at c from `steps` products each; a and b advance by a_step and b_step bytes.
  template <bool kAdd>
  [[gnu::always_inline]] static void block(const uint8_t* a, int64_t a_stride, int64_t a_step,
                                           const uint8_t* b, int32_t steps, float* c) {
    float* const below = c + 16 * kFlashTile;
    if constexpr (kAdd) {
      _tile_loadd(0, c, kLaneBytes);
      _tile_loadd(1, c + kLanes, kLaneBytes);
      _tile_loadd(2, below, kLaneBytes);
      _tile_loadd(3, below + kLanes, kLaneBytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int32_t i = 0; i < steps; ++i) {
      _tile_loadd(4, a + i * a_step, a_stride);
      _tile_loadd(6, b + i * 16 * kLaneBytes, kLaneBytes);
      _tile_loadd(7, b + i * 16 * kLaneBytes + 64, kLaneBytes);
      _tile_loadd(5, a + i * a_step + 16 * a_stride, a_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, kLaneBytes);
    _tile_stored(1, c + kLanes, kLaneBytes);
    _tile_stored(2, below, kLaneBytes);
    _tile_stored(3, below + kLanes, kLaneBytes);
  }

  static void scores(const float* rows, int32_t count, int32_t dims, const float* by, int32_t lanes, float* c,
                     FlashPrefetch next) {
    compiler_fence();
    const auto* const a = reinterpret_cast<const uint8_t*>(rows);
    for (int32_t lane = 0; lane < lanes; lane += kFlashStep) {
      for (int32_t m = 0; m < whole_steps(count); m += kFlashStep) {
        for (int i = 0; i < 4; ++i) next();
        block<false>(a + int64_t{m} * dims * 2, dims * 2, 64, reinterpret_cast<const uint8_t*>(by + lane),
                     dims / kFlashStep, c + m * kFlashTile + lane);
      }
    }
    compiler_fence();
  }

  // The second half of the rows' memory takes their transpose.
  static void prepare(float* rows, int32_t count, int32_t dims) {
    auto* const as_they_lie = reinterpret_cast<uint16_t*>(rows);
    compiler_fence();
    transpose_rows(as_they_lie, count, dims, as_they_lie + int64_t{kFlashTile} * dims);
    compiler_fence();
  }
  static void accumulate(const float* rows, int32_t count, int32_t dims, float* by, int32_t lanes, float* c,
                         FlashPrefetch next) {
    const uint16_t* const transposed = reinterpret_cast<const uint16_t*>(rows) + int64_t{kFlashTile} * dims;
    compiler_fence();
    pair_weights(by, count, lanes);
    compiler_fence();
    const auto* const a = reinterpret_cast<const uint8_t*>(transposed);
    for (int32_t lane = 0; lane < lanes; lane += kFlashStep) {
      for (int32_t m = 0; m < dims; m += kFlashStep) {
        for (int i = 0; i < 4; ++i) next();
        block<true>(a + int64_t{m} * kFlashTile * 2, kFlashTile * 2, 64,
                    reinterpret_cast<const uint8_t*>(by + lane), whole_steps(count) / kFlashStep,
                    c + m * kFlashTile + lane);
      }
    }
    compiler_fence();
  }
};

// By tiles where the tensors are bf16 and heads are whole steps: a matter of the problem alone.
template <FlashFn kTiles, FlashFn kFloat>
void flash_by_tiles(const FlashTask& task) {
  const FlashProblem& p = *task.problem;
  if (task.sequence->q.type != FlashType::kBF16 || p.head_dim % kFlashStep != 0 ||
      p.value_dim % kFlashStep != 0) {
    return kFloat(task);
  }
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  compiler_fence();
  _tile_loadconfig(&config);
  kTiles(task);
  _tile_release();
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
