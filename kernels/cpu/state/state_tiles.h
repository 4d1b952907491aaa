// Products with a state by tiles of registers: what rows read of it, and the state behind a chunk. Both go
// over strips of columns, which need nothing of one another (state_chunk.h, wkv7_chunk.h).
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/state/state_task.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Rows that share the loads of a strip, and vectors of a strip: so many sums are in registers. Where there is
// a register for each vector, eight rows by two: ten loads for sixteen products. Strips of few rows (one
// token's query and key) are wider, so that a state that comes from memory is read in long runs.
#if defined(MILLRACE_SIMD_AVX512)
constexpr int kTileRows = 8, kTileCols = 2, kWideCols = 8;
#else
constexpr int kTileRows = 4, kTileCols = 1, kWideCols = 2;
#endif
constexpr int kFewRows = 2;

inline int64_t whole_vectors(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

inline V16 load_some(const float* from, int64_t count) {
  return count >= kLanes ? Simd::load(from) : load_tail<LoadF32>(from, count);
}

inline float key_dot(const float* a, const float* b, int64_t size) {
  V16 sum = Simd::zero();
  for (int64_t i = 0; i < size; i += kLanes)
    sum = Simd::fma(load_some(a + i, size - i), load_some(b + i, size - i), sum);
  return Simd::reduce_sum(sum);
}

// out[r] = S^T x[r] of the strip that `state` begins: rows of `stride` floats; out: [kRows][16 kCols].
template <int kRows, int kCols>
inline void read_tile(const float* state, int64_t key_dim, int64_t stride, const float* const* x,
                      float* out) {
  V16 sum[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) sum[r][c] = Simd::zero();
  }
  for (int64_t d = 0; d < key_dim; ++d) {
    V16 s[kCols];
    for (int c = 0; c < kCols; ++c) s[c] = Simd::load(state + d * stride + c * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const V16 by = Simd::broadcast(x[r][d]);
      for (int c = 0; c < kCols; ++c) sum[r][c] = Simd::fma(by, s[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) Simd::store(out + (r * kCols + c) * kLanes, sum[r][c]);
  }
}

template <int kCols>
inline void read_strip(const float* state, int64_t key_dim, int64_t stride, const float* const* x, int rows,
                       float* out) {
  constexpr int64_t kRow = kCols * kLanes;
  int r = 0;
  if constexpr (kCols <= kTileCols) {
    for (; r + kTileRows <= rows; r += kTileRows)
      read_tile<kTileRows, kCols>(state, key_dim, stride, x + r, out + r * kRow);
  }
  for (; r + kFewRows <= rows; r += kFewRows)
    read_tile<kFewRows, kCols>(state, key_dim, stride, x + r, out + r * kRow);
  if (r < rows) read_tile<1, kCols>(state, key_dim, stride, x + r, out + r * kRow);
}

// sum[c] += by[t] y[t] for t < terms, in order; `at` is where the strip begins.
template <int kCols>
inline void add_terms(V16* sum, const float* by, const float* const* y, int terms, int64_t at) {
  for (int t = 0; t < terms; ++t) {
    const V16 all = Simd::broadcast(by[t]);
    for (int c = 0; c < kCols; ++c) sum[c] = Simd::fma(all, Simd::load(y[t] + at + c * kLanes), sum[c]);
  }
}

// A state's rows from an old one (null: zeros) and what was written: for each row d of it
// left[d] S[d] + the sum over t of by[t][d] y[t], in order.
struct StateWrite {
  const float* state;
  float* out;
  int64_t stride;
  const float* left;  // left_step floats apart: 0 where all rows have the same
  int64_t left_step;
  const float* by;  // [terms][by_stride]
  int64_t by_stride;
  const float* const* y;
  int terms;
};

template <int kRows, int kCols>
inline void write_tile(const StateWrite& op, int64_t d, int64_t at) {
  V16 sum[kRows][kCols];
  for (int r = 0; r < kRows; ++r) {
    const V16 left = Simd::broadcast(op.left[(d + r) * op.left_step]);
    for (int c = 0; c < kCols; ++c) {
      sum[r][c] = op.state == nullptr
                      ? Simd::zero()
                      : Simd::mul(left, Simd::load(op.state + (d + r) * op.stride + at + c * kLanes));
    }
  }
  const float* by = op.by + d;
  for (int t = 0; t < op.terms; ++t, by += op.by_stride) {
    V16 y[kCols];
    for (int c = 0; c < kCols; ++c) y[c] = Simd::load(op.y[t] + at + c * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const V16 all = Simd::broadcast(by[r]);
      for (int c = 0; c < kCols; ++c) sum[r][c] = Simd::fma(all, y[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) Simd::store(op.out + (d + r) * op.stride + at + c * kLanes, sum[r][c]);
  }
}

template <int kCols>
inline void write_strip(const StateWrite& op, int64_t key_dim, int64_t at) {
  constexpr int kRows = kCols <= kTileCols ? kTileRows : kFewRows;
  int64_t d = 0;
  for (; d + kRows <= key_dim; d += kRows) write_tile<kRows, kCols>(op, d, at);
  for (; d < key_dim; ++d) write_tile<1, kCols>(op, d, at);
}

// strip(at, number of columns of vectors) over all of them; `few`: no more than kFewRows rows are read.
template <class Strip>
inline void each_strip(int64_t padded_dim, bool few, const Strip& strip) {
  int64_t at = 0;
  for (; few && at + kWideCols * kLanes <= padded_dim; at += kWideCols * kLanes)
    strip.template operator()<kWideCols>(at);
  for (; at + kTileCols * kLanes <= padded_dim; at += kTileCols * kLanes)
    strip.template operator()<kTileCols>(at);
  for (; at < padded_dim; at += kLanes) strip.template operator()<1>(at);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
