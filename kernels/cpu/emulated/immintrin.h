// Stands for <immintrin.h> where the AVX-512 and AMX kernels are tested on a processor that has neither:
// vectors by SIMDe, what it lacks (of Debian 12's version) and the tiles written out here. Not fast, and not
// for x86.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using __mmask16 = uint16_t;
using __mmask64 = uint64_t;

namespace emulated {

template <class T>
struct Lanes {
  T of[16];
};
template <class To, class From>
To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
// Lane by lane.
template <class To, class From, class Vector, class F>
auto map(const Vector& v, F f) {
  const auto from = as<Lanes<From>>(v);
  Lanes<To> to;
  for (int i = 0; i < 16; ++i) to.of[i] = f(from.of[i]);
  return to;
}
template <class T, class Vector>
Vector permute(const Vector& v, int order) {
  const auto from = as<Lanes<T>>(v);
  Lanes<T> to;
  for (int i = 0; i < 16; ++i) to.of[i] = from.of[i / 4 * 4 + (order >> (2 * (i % 4)) & 3)];
  return as<Vector>(to);
}

// Eight tiles of 16 rows of 64 bytes, and the 64 bytes of their configuration.
struct Tiles {
  uint8_t config[64];
  uint8_t rows_of[8][16][64];
  int rows(int tile) const { return config[48 + tile]; }
  int row_bytes(int tile) const { return config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }
};
inline thread_local Tiles tiles;

template <class T>
T at(int tile, int row, int index) {
  T value;
  std::memcpy(&value, tiles.rows_of[tile][row] + index * static_cast<int>(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void put(int tile, int row, int index, T value) {
  std::memcpy(tiles.rows_of[tile][row] + index * static_cast<int>(sizeof(T)), &value, sizeof(T));
}
inline float bf16(int tile, int row, int index) {
  return as<float>(static_cast<uint32_t>(at<uint16_t>(tile, row, index)) << 16);
}

// Lines that are prefetched into the second-level cache, where somebody wants to know.
inline thread_local std::vector<const void*>* prefetched = nullptr;
inline void prefetch(const void* line, int hint) {
  if (hint == _MM_HINT_T1 && prefetched != nullptr) prefetched->push_back(line);
}

}  // namespace emulated

#undef _mm_prefetch
#define _mm_prefetch(line, hint) emulated::prefetch(line, hint)

// ---------------------------------------------------------------- vectors

enum { _MM_PERM_DBCA = 0xd8 };
#define _mm512_permute_ps(v, order) emulated::permute<float>(v, order)
#define _mm512_shuffle_epi32(v, order) emulated::permute<int32_t>(v, order)
#define _mm512_shuffle_f32x4(a, b, order) \
  _mm512_castsi512_ps(_mm512_shuffle_i32x4(_mm512_castps_si512(a), _mm512_castps_si512(b), order))

inline __m512 _mm512_cvtepi32_ps(__m512i v) {
  return emulated::as<__m512>(
      emulated::map<float, int32_t>(v, [](int32_t x) { return static_cast<float>(x); }));
}
// To nearest even; what does not fit is the smallest integer.
inline __m512i _mm512_cvtps_epi32(__m512 v) {
  return emulated::as<__m512i>(emulated::map<int32_t, float>(v, [](float x) {
    return x >= -0x1p31f && x < 0x1p31f ? static_cast<int32_t>(std::nearbyint(x)) : INT32_MIN;
  }));
}
inline __m512 _mm512_cvtph_ps(__m256i v) {
  return emulated::as<__m512>(
      emulated::map<float, __fp16>(v, [](__fp16 x) { return static_cast<float>(x); }));
}
#ifndef _MM_FROUND_NO_EXC
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#endif
// To nearest even, which is how they are called.
inline __m256i _mm512_cvtps_ph(__m512 v, int) {
  return emulated::as<__m256i>(
      emulated::map<__fp16, float>(v, [](float x) { return static_cast<__fp16>(x); }));
}
#undef _mm512_madd_epi16  // which takes four arguments there
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) { return simde_mm512_madd_epi16(a, b); }
inline __m512i _mm512_cvtepu8_epi32(__m128i v) {
  return emulated::as<__m512i>(emulated::map<int32_t, uint8_t>(v, [](uint8_t x) { return int32_t{x}; }));
}
inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return emulated::as<__m512i>(emulated::map<int32_t, uint16_t>(v, [](uint16_t x) { return int32_t{x}; }));
}
inline __m256i _mm512_cvtepi32_epi16(__m512i v) {
  return emulated::as<__m256i>(
      emulated::map<uint16_t, uint32_t>(v, [](uint32_t x) { return static_cast<uint16_t>(x); }));
}
inline __m128i _mm512_cvtepi32_epi8(__m512i v) {
  return emulated::as<__m128i>(
      emulated::map<uint8_t, uint32_t>(v, [](uint32_t x) { return static_cast<uint8_t>(x); }));
}
inline __m512i _mm512_srai_epi32(__m512i v, unsigned bits) {
  return emulated::as<__m512i>(emulated::map<int32_t, int32_t>(v, [&](int32_t x) { return x >> bits; }));
}
inline int32_t _mm512_reduce_add_epi32(__m512i v) {
  int32_t sum = 0;
  for (const int32_t x : emulated::as<emulated::Lanes<int32_t>>(v).of) sum += x;
  return sum;
}
inline float _mm512_cvtss_f32(__m512 v) { return emulated::as<emulated::Lanes<float>>(v).of[0]; }
inline __mmask16 _mm512_cmpgt_epu32_mask(__m512i a, __m512i b) {
  const auto x = emulated::as<emulated::Lanes<uint32_t>>(a), y = emulated::as<emulated::Lanes<uint32_t>>(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x.of[i] > y.of[i]) << i;
  return static_cast<__mmask16>(mask);
}
inline __mmask16 _mm_cmpeq_epi8_mask(__m128i a, __m128i b) {
  return static_cast<__mmask16>(_mm_movemask_epi8(_mm_cmpeq_epi8(a, b)));
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
  emulated::Lanes<float> lanes{};
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) lanes.of[i] = from[i];
  }
  return emulated::as<__m512>(lanes);
}
inline void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 v) {
  const auto x = emulated::as<emulated::Lanes<float>>(v);
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) to[i] = x.of[i];
  }
}

// ---------------------------------------------------------------- tiles

inline void _tile_loadconfig(const void* config) {
  emulated::tiles = {};
  std::memcpy(emulated::tiles.config, config, sizeof(emulated::tiles.config));
}
inline void _tile_release() { emulated::tiles = {}; }
inline void _tile_zero(int tile) {
  std::memset(emulated::tiles.rows_of[tile], 0, sizeof(emulated::tiles.rows_of[tile]));
}
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  _tile_zero(tile);
  for (int r = 0; r < emulated::tiles.rows(tile); ++r) {
    std::memcpy(emulated::tiles.rows_of[tile][r], static_cast<const uint8_t*>(from) + r * stride,
                static_cast<size_t>(emulated::tiles.row_bytes(tile)));
  }
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
  for (int r = 0; r < emulated::tiles.rows(tile); ++r) {
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, emulated::tiles.rows_of[tile][r],
                static_cast<size_t>(emulated::tiles.row_bytes(tile)));
  }
}
// sums [m][n] += a [m][k] b [k / 4][n][4]
inline void _tile_dpbssd(int sums, int a, int b) {
  for (int m = 0; m < emulated::tiles.rows(sums); ++m) {
    for (int n = 0; n < emulated::tiles.row_bytes(sums) / 4; ++n) {
      int32_t sum = emulated::at<int32_t>(sums, m, n);
      for (int k = 0; k < emulated::tiles.row_bytes(a); ++k) {
        sum += emulated::at<int8_t>(a, m, k) * emulated::at<int8_t>(b, k / 4, 4 * n + k % 4);
      }
      emulated::put(sums, m, n, sum);
    }
  }
}
// sums [m][n] += a [m][k] b [k / 2][n][2]: even and odd products are summed apart, then added.
inline void _tile_dpbf16ps(int sums, int a, int b) {
  for (int m = 0; m < emulated::tiles.rows(sums); ++m) {
    for (int n = 0; n < emulated::tiles.row_bytes(sums) / 4; ++n) {
      float part[2] = {0.0f, 0.0f};
      for (int k = 0; k < emulated::tiles.row_bytes(a) / 2; ++k) {
        part[k % 2] = std::fma(emulated::bf16(a, m, k), emulated::bf16(b, k / 2, 2 * n + k % 2), part[k % 2]);
      }
      emulated::put(sums, m, n, emulated::at<float>(sums, m, n) + (part[0] + part[1]));
    }
  }
}
