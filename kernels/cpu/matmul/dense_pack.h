// Operands of products of plain matrices to floats and sums to the elements of an output, the part of an
// instruction set: elements in order, and transposed, sixteen by sixteen in registers.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct LoadDenseE4M3 {
  using Stored = uint8_t;
  static V16 load(const uint8_t* p) { return load_e4m3<Simd>(p); }
};

struct LoadDenseE5M2 {  // the upper byte of a float16
  using Stored = uint8_t;
  static V16 load(const uint8_t* p) {
    uint16_t halves[kLanes];
    for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(p[i] << 8);
    return Simd::load_f16(halves);
  }
};

struct LoadDenseI8 {
  using Stored = int8_t;
  static V16 load(const int8_t* p) {
    float floats[kLanes];
    for (int i = 0; i < kLanes; ++i) floats[i] = static_cast<float>(p[i]);
    return Simd::load(floats);
  }
};

template <class Load>
void widen_all(const void* from, int64_t count, float* to) {
  const auto* stored = static_cast<const typename Load::Stored*>(from);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Simd::store(to + i, Load::load(stored + i));
  if (i == count) return;
  float tail[kLanes];
  Simd::store(tail, load_tail<Load>(stored + i, count - i));
  for (int64_t j = 0; i + j < count; ++j) to[i + j] = tail[j];
}

// v[i] lane j becomes v[j] lane i.
#if defined(MILLRACE_SIMD_AVX512)
[[gnu::always_inline]] inline void transpose_sixteen(V16 (&v)[16]) {
  V16 pairs[16];  // [quad of rows][column of four] of lanes of 128 bits
  for (int q = 0; q < 16; q += 4) {
    const V16 low = _mm512_unpacklo_ps(v[q], v[q + 1]), high = _mm512_unpackhi_ps(v[q], v[q + 1]);
    const V16 low2 = _mm512_unpacklo_ps(v[q + 2], v[q + 3]), high2 = _mm512_unpackhi_ps(v[q + 2], v[q + 3]);
    const auto join = [](V16 a, V16 b, auto of) {
      return _mm512_castpd_ps(of(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    const auto lower = [](__m512d a, __m512d b) { return _mm512_unpacklo_pd(a, b); };
    const auto upper = [](__m512d a, __m512d b) { return _mm512_unpackhi_pd(a, b); };
    pairs[q] = join(low, low2, lower);
    pairs[q + 1] = join(low, low2, upper);
    pairs[q + 2] = join(high, high2, lower);
    pairs[q + 3] = join(high, high2, upper);
  }
  for (int c = 0; c < 4; ++c) {
    const V16 even = _mm512_shuffle_f32x4(pairs[c], pairs[4 + c], 0x88),
              odd = _mm512_shuffle_f32x4(pairs[c], pairs[4 + c], 0xdd),
              even2 = _mm512_shuffle_f32x4(pairs[8 + c], pairs[12 + c], 0x88),
              odd2 = _mm512_shuffle_f32x4(pairs[8 + c], pairs[12 + c], 0xdd);
    v[c] = _mm512_shuffle_f32x4(even, even2, 0x88);
    v[4 + c] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
    v[8 + c] = _mm512_shuffle_f32x4(even, even2, 0xdd);
    v[12 + c] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
}
#elif defined(MILLRACE_SIMD_AVX2)
[[gnu::always_inline]] inline void transpose_eight(const __m256 (&r)[8], __m256 (&to)[8]) {
  __m256 quads[8];  // [quad of rows][column of four] of lanes of 128 bits
  for (int q = 0; q < 8; q += 4) {
    const __m256 low = _mm256_unpacklo_ps(r[q], r[q + 1]), high = _mm256_unpackhi_ps(r[q], r[q + 1]);
    const __m256 low2 = _mm256_unpacklo_ps(r[q + 2], r[q + 3]),
                 high2 = _mm256_unpackhi_ps(r[q + 2], r[q + 3]);
    quads[q] = _mm256_shuffle_ps(low, low2, 0x44);
    quads[q + 1] = _mm256_shuffle_ps(low, low2, 0xee);
    quads[q + 2] = _mm256_shuffle_ps(high, high2, 0x44);
    quads[q + 3] = _mm256_shuffle_ps(high, high2, 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    to[c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
    to[4 + c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
  }
}
[[gnu::always_inline]] inline void transpose_sixteen(V16 (&v)[16]) {
  __m256 from[8], upper_left[8], lower_left[8], upper_right[8], lower_right[8];
  for (int i = 0; i < 8; ++i) from[i] = v[i].a;
  transpose_eight(from, upper_left);
  for (int i = 0; i < 8; ++i) from[i] = v[i].b;
  transpose_eight(from, upper_right);
  for (int i = 0; i < 8; ++i) from[i] = v[8 + i].a;
  transpose_eight(from, lower_left);
  for (int i = 0; i < 8; ++i) from[i] = v[8 + i].b;
  transpose_eight(from, lower_right);
  for (int i = 0; i < 8; ++i) {
    v[i] = {upper_left[i], lower_left[i]};
    v[8 + i] = {upper_right[i], lower_right[i]};
  }
}
#elif defined(MILLRACE_SIMD_NEON)
[[gnu::always_inline]] inline void transpose_sixteen(V16 (&v)[16]) {
  float32x4_t from[16][4], to[16][4];  // [row][quad of columns]
  for (int i = 0; i < 16; ++i) {
    from[i][0] = v[i].a, from[i][1] = v[i].b, from[i][2] = v[i].c, from[i][3] = v[i].d;
  }
  const auto as_pairs = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
  const auto as_floats = [](float64x2_t x) { return vreinterpretq_f32_f64(x); };
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) {
      const float32x4_t a = from[4 * r][c], b = from[4 * r + 1][c], d = from[4 * r + 2][c],
                        e = from[4 * r + 3][c];
      const float64x2_t even = as_pairs(vtrn1q_f32(a, b)), odd = as_pairs(vtrn2q_f32(a, b)),
                        even2 = as_pairs(vtrn1q_f32(d, e)), odd2 = as_pairs(vtrn2q_f32(d, e));
      to[4 * c][r] = as_floats(vtrn1q_f64(even, even2));
      to[4 * c + 1][r] = as_floats(vtrn1q_f64(odd, odd2));
      to[4 * c + 2][r] = as_floats(vtrn2q_f64(even, even2));
      to[4 * c + 3][r] = as_floats(vtrn2q_f64(odd, odd2));
    }
  }
  for (int i = 0; i < 16; ++i) v[i] = {to[i][0], to[i][1], to[i][2], to[i][3]};
}
#else
inline void transpose_sixteen(V16 (&v)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = v[i].v[j];
      v[i].v[j] = v[j].v[i];
      v[j].v[i] = x;
    }
  }
}
#endif

// Sixteen rows of up to sixteen elements, `stride` bytes apart, transposed; rows behind `rows` are zero.
template <class Load>
[[gnu::always_inline]] inline void load_transposed(const uint8_t* from, int64_t stride, int64_t rows,
                                                   int64_t count, int64_t ahead, V16 (&v)[16]) {
  using Stored = typename Load::Stored;
  const auto row = [&](int64_t i) { return reinterpret_cast<const Stored*>(from + i * stride); };
  if (rows >= kLanes && count >= kLanes) {
    unroll<kLanes>([&](auto i) __attribute__((always_inline)) {
      __builtin_prefetch(from + i * stride + ahead, 0, 2);
      v[i] = Load::load(row(i));
    });
  } else {
    for (int64_t i = 0; i < kLanes; ++i) {
      v[i] = i >= rows ? Simd::zero() : count >= kLanes ? Load::load(row(i)) : load_tail<Load>(row(i), count);
    }
  }
  transpose_sixteen(v);
}

template <class Load>
void transpose_all(const DenseTranspose& t) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(typename Load::Stored));
  for (int64_t c = 0; c < t.columns; c += kLanes) {
    for (int64_t k = 0; k < t.depth; k += kLanes) {
      V16 v[kLanes];
      // What is likely to come next of these rows is prefetched.
      load_transposed<Load>(t.from + c * t.stride + k * kBytes, t.stride, t.columns - c, t.depth - k,
                            t.depth * kBytes, v);
      const int64_t some = t.depth - k < kLanes ? t.depth - k : kLanes;
      float* const to = t.to + k * kDenseLanes + c;
      if (some == kLanes) {
        unroll<kLanes>([&](auto i)
                           __attribute__((always_inline)) { Simd::store(to + i * kDenseLanes, v[i]); });
      } else {
        for (int64_t i = 0; i < some; ++i) Simd::store(to + i * kDenseLanes, v[i]);
      }
    }
  }
}

// Calls `call` with the loader of an element.
template <class Call>
[[gnu::always_inline]] inline void with_loader(DenseElement type, const Call& call) {
  switch (type) {
    case DenseElement::kF32:
      return call(LoadF32{});
    case DenseElement::kF16:
      return call(LoadF16{});
    case DenseElement::kBF16:
      return call(LoadBF16{});
    case DenseElement::kE4M3:
      return call(LoadDenseE4M3{});
    case DenseElement::kE5M2:
      return call(LoadDenseE5M2{});
    case DenseElement::kI8:
      return call(LoadDenseI8{});
  }
}

void dense_widen(DenseElement type, const void* from, int64_t count, float* to) {
  with_loader(type, [&](auto load) { widen_all<decltype(load)>(from, count, to); });
}
void dense_transpose(const DenseTranspose& t) {
  with_loader(t.type, [&](auto load) { transpose_all<decltype(load)>(t); });
}

// y += a * b, fused.
void dense_multiply_add(const float* a, const float* b, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    Simd::store(y + i, Simd::fma(Simd::load(a + i), Simd::load(b + i), Simd::load(y + i)));
  for (; i < count; ++i) y[i] = __builtin_fmaf(a[i], b[i], y[i]);
}

// To F32, F16 or BF16.
void dense_narrow(DenseElement type, const float* from, int64_t count, void* to) {
  auto* halves = static_cast<uint16_t*>(to);
  const auto put = [&](V16 x, uint16_t* at) {
    if (type == DenseElement::kF16) {
      Simd::store_f16(at, x);
    } else {
      Simd::store_bf16(at, x);
    }
  };
  if (type == DenseElement::kF32) {
    __builtin_memcpy(to, from, static_cast<size_t>(count) * 4);
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put(Simd::load(from + i), halves + i);
  if (i == count) return;
  uint16_t tail[kLanes];
  put(load_tail<LoadF32>(from + i, count - i), tail);
  for (int64_t j = 0; i + j < count; ++j) halves[i + j] = tail[j];
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
