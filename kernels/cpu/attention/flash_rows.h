// Rows of a tensor as floats and back: as rows [row][dim], which products broadcast from, and as lanes
// [dim][64], which they multiply.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_gemm.h"
#include "kernels/cpu/attention/flash_task.h"
#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct LoadE4M3 {
  using Stored = uint8_t;
  static V16 load(const uint8_t* p) { return load_e4m3<Simd>(p); }
};

// Writes whole vectors: up to 8 floats behind the row.
template <class Load>
void widen_row(const uint8_t* from, int32_t dims, float scale, float* to) {
  const auto* stored = reinterpret_cast<const typename Load::Stored*>(from);
  const V16 by = Simd::broadcast(scale);
  const auto put = [&](int32_t d, V16 x) {
    if constexpr (sizeof(typename Load::Stored) == 1) x = Simd::mul(x, by);
    Simd::store(to + d, x);
  };
  int32_t d = 0;
  for (; d + kLanes <= dims; d += kLanes) put(d, Load::load(stored + d));
  if (d < dims) put(d, load_tail<Load>(stored + d, dims - d));
}

void load_row(const FlashRows& of, int64_t row, int64_t head, int32_t dims, float* to) {
  const uint8_t* from = of.at(row, head);
  switch (of.type) {
    case FlashType::kF32:
      return widen_row<LoadF32>(from, dims, 1.0f, to);
    case FlashType::kF16:
      return widen_row<LoadF16>(from, dims, 1.0f, to);
    case FlashType::kBF16:
      return widen_row<LoadBF16>(from, dims, 1.0f, to);
    case FlashType::kFp8:
      return widen_row<LoadE4M3>(from, dims, of.scale(row, head), to);
  }
}

// Rows [first, first + count) to [count][dims], and zeros up to the next multiple of kFlashM rows.
void load_row_tile(const FlashRows& of, int32_t first, int32_t count, int64_t head, int32_t dims, float* to) {
  for (int32_t r = 0; r < count; ++r) load_row(of, first + r, head, dims, to + int64_t{r} * dims);
  const int32_t padded = (count + kFlashM - 1) / kFlashM * kFlashM;
  for (int64_t i = int64_t{count} * dims; i < int64_t{padded} * dims; ++i) to[i] = 0.0f;
}

// Rows [first, first + 64) of a sequence of `length` rows, to be loaded next.
inline FlashPrefetch next_rows(const FlashRows& of, int32_t first, int32_t length, int32_t head,
                               int32_t dims) {
  const int64_t size = of.type == FlashType::kF32 ? 4 : of.type == FlashType::kFp8 ? 1 : 2;
  const int32_t last = length - first < kFlashTile ? length : first + kFlashTile;
  return {&of, first, last, head, dims * size};
}

int32_t whole_lanes(int32_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Rows at(0), at(1) ... each a (row, head), to [dims][64]; lanes behind them are zero. staging: [dims + 8]
struct RowHead {
  int64_t row, head;
};
template <class At>
void load_row_lanes(const FlashRows& of, int32_t count, int32_t dims, float* staging, float* to,
                    const At& at) {
  for (int32_t r = 0; r < whole_lanes(count); ++r) {
    if (r < count) load_row(of, at(r).row, at(r).head, dims, staging);
    for (int32_t d = 0; d < dims; ++d) to[d * kFlashTile + r] = r < count ? staging[d] : 0.0f;
  }
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t round_to_bf16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16, nan = u >> 16 | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

#if defined(MILLRACE_SIMD_AVX512) || defined(MILLRACE_SIMD_AVX2)
inline void store_halves8(const float* from, uint16_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(MILLRACE_SIMD_NEON)
inline void store_halves8(const float* from, uint16_t* to) {
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from))));
  vst1_u16(to + 4, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + 4))));
}
#else
inline uint16_t round_to_half(float x) {
  const uint32_t u = Simd::float_to_bits(x), magnitude = u & 0x7fffffffu;
  const auto sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds
    const float shifted = Simd::bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (Simd::float_to_bits(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}
inline void store_halves8(const float* from, uint16_t* to) {
  for (int i = 0; i < 8; ++i) to[i] = round_to_half(from[i]);
}
#endif

// dims: a multiple of 8. FP8 is never written.
void store_row(const FlashRows& to, int64_t row, int64_t head, int32_t dims, const float* from) {
  uint8_t* at = to.at(row, head);
  if (to.type == FlashType::kF32) {
    __builtin_memcpy(at, from, static_cast<size_t>(dims) * sizeof(float));
  } else if (to.type == FlashType::kF16) {
    for (int32_t d = 0; d < dims; d += 8) store_halves8(from + d, reinterpret_cast<uint16_t*>(at) + d);
  } else {
    auto* words = reinterpret_cast<uint16_t*>(at);
    for (int32_t d = 0; d < dims; ++d) words[d] = round_to_bf16(from[d]);
  }
}

// Sums [dims][64], each lane times its factor, to rows at(0), at(1) ... Adding zero leaves no -0, whose sign
// would tell whether chunks of which a row sees nothing were added.
template <class At>
void store_lanes(const FlashRows& to, int32_t count, int32_t dims, const float* sums, const float* factor,
                 float* staging, const At& at) {
  for (int32_t r = 0; r < count; ++r) {
    for (int32_t d = 0; d < dims; ++d) staging[d] = sums[d * kFlashTile + r] * factor[r] + 0.0f;
    store_row(to, at(r).row, at(r).head, dims, staging);
  }
}

// How a tile's products are computed: in float32, of any type. (By bf16 tiles: flash_amx.h.)
struct FlashFloat {
  static void load_rows(const FlashRows& of, int32_t first, int32_t count, int32_t head, int32_t dims,
                        float* to) {
    load_row_tile(of, first, count, head, dims, to);
  }
  template <class At>
  static void load_lanes(const FlashRows& of, int32_t count, int32_t dims, float* staging, float* to,
                         const At& at) {
    load_row_lanes(of, count, dims, staging, to, at);
  }
  // c [count][lanes] = rows [count][dims] x by [dims][lanes]
  static void scores(const float* rows, int32_t count, int32_t dims, const float* by, int32_t lanes, float* c,
                     const FlashPrefetch& next) {
    const int32_t padded = (count + kFlashM - 1) / kFlashM * kFlashM;
    flash_gemm<true>(rows, dims, padded, dims, by, lanes, c, next);
  }
  // Rows that accumulate() will take, once.
  static void prepare(float*, int32_t, int32_t) {}
  // c [dims][lanes] += the transpose of rows [count][dims] x by [count][lanes], which may be overwritten
  static void accumulate(const float* rows, int32_t count, int32_t dims, float* by, int32_t lanes, float* c,
                         const FlashPrefetch& next) {
    flash_gemm<false>(rows, dims, dims, count, by, lanes, c, next);
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
