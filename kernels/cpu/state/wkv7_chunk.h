// RWKV 7: the rows of a chunk and the state behind it (wkv7_task.h says what is computed,
// docs/kernels/state_space.md why so).
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/state/state_tiles.h"
#include "kernels/cpu/state/wkv7_task.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// What rows before it are to a row, and itself: of v_j and u_j in turn, in its u and in its output.
struct Wkv7Weights {
  float write[2 * kChunkRows], output[2 * kChunkRows];
};

inline void copy_padded(const float* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += kLanes) Simd::store(to + i, load_some(from + i, size - i));
}

// a . k, a . b, r . k and r . b of row j; then a and r are decayed by it.
inline void weigh_row(const Wkv7Chunk& chunk, int j, float* a, float* r, Wkv7Weights& to) {
  V16 ak = Simd::zero(), ab = Simd::zero(), rk = Simd::zero(), rb = Simd::zero();
  const int64_t size = chunk.key_dim;
  for (int64_t i = 0; i < size; i += kLanes) {
    const V16 k = load_some(chunk.k[j] + i, size - i), b = load_some(chunk.b[j] + i, size - i);
    const V16 decay = load_some(chunk.decay[j] + i, size - i);
    const V16 ai = Simd::load(a + i), ri = Simd::load(r + i);
    ak = Simd::fma(ai, k, ak);
    ab = Simd::fma(ai, b, ab);
    rk = Simd::fma(ri, k, rk);
    rb = Simd::fma(ri, b, rb);
    Simd::store(a + i, Simd::mul(ai, decay));
    Simd::store(r + i, Simd::mul(ri, decay));
  }
  to.write[2 * j] = Simd::reduce_sum(ak);
  to.write[2 * j + 1] = Simd::reduce_sum(ab);
  to.output[2 * j] = Simd::reduce_sum(rk);
  to.output[2 * j + 1] = Simd::reduce_sum(rb);
}

// The same of the row itself, which only its output reads.
inline void weigh_own(const Wkv7Chunk& chunk, int i, float* r, Wkv7Weights& to) {
  const int64_t size = chunk.key_dim;
  to.output[2 * i] = key_dot(r, chunk.k[i], size);
  to.output[2 * i + 1] = key_dot(r, chunk.b[i], size);
  for (int64_t c = 0; c < size; c += kLanes)
    Simd::store(r + c, Simd::mul(Simd::load(r + c), load_some(chunk.decay[i] + c, size - c)));
}

// Keys as far as they are left behind the last row, k and b in turn, and what is left of the state.
inline void decay_to_end(const Wkv7Chunk& chunk, int64_t stride, float* keys, float* left) {
  const int64_t size = chunk.key_dim;
  for (int64_t c = 0; c < size; c += kLanes) {
    V16 by = Simd::broadcast(1.0f);
    for (int j = chunk.last - 1; j >= 0; --j) {
      float* const k = keys + 2 * j * stride + c;
      Simd::store(k, Simd::mul(by, load_some(chunk.k[j] + c, size - c)));
      Simd::store(k + stride, Simd::mul(by, load_some(chunk.b[j] + c, size - c)));
      by = Simd::mul(by, load_some(chunk.decay[j] + c, size - c));
    }
    Simd::store(left + c, by);
  }
}

// Rows of one strip from what they read of the state: [of a, then of r][16 kCols], or null. writes: v and u
// in turn.
template <int kCols>
inline void strip_rows(const Wkv7Chunk& chunk, const Wkv7Weights* weights, const float* const* writes,
                       const float* read, int64_t at) {
  constexpr int64_t kRow = kCols * kLanes;
  const int rows = chunk.last - chunk.first;
  const auto begin = [&](int row, V16* sum) {
    for (int c = 0; c < kCols; ++c)
      sum[c] = read == nullptr ? Simd::zero() : Simd::load(read + row * kRow + c * kLanes);
  };
  const auto end = [&](float* to, const V16* sum) {
    for (int c = 0; c < kCols; ++c) Simd::store(to + at + c * kLanes, sum[c]);
  };
  V16 sum[kCols];
  for (int n = 0; n < rows; ++n) {
    begin(n, sum);
    add_terms<kCols>(sum, weights[n].write, writes, 2 * (chunk.first + n), at);
    end(chunk.u[chunk.first + n], sum);
  }
  for (int n = 0; n < rows; ++n) {
    begin(rows + n, sum);
    add_terms<kCols>(sum, weights[n].output, writes, 2 * (chunk.first + n + 1), at);
    end(chunk.o[chunk.first + n], sum);
  }
}

void wkv7_chunk(const Wkv7Chunk& chunk) {
  const int64_t stride = whole_vectors(chunk.key_dim);
  const int rows = chunk.last - chunk.first;
  Wkv7Weights weights[kChunkRows];
  const float* x[2 * kChunkRows];
  for (int n = 0; n < rows; ++n) {
    const int i = chunk.first + n;
    float* const a = chunk.scratch + n * stride;
    float* const r = chunk.scratch + (rows + n) * stride;
    copy_padded(chunk.a[i], chunk.key_dim, a);
    copy_padded(chunk.r[i], chunk.key_dim, r);
    weigh_own(chunk, i, r, weights[n]);
    for (int j = i - 1; j >= 0; --j) weigh_row(chunk, j, a, r, weights[n]);
    x[n] = a;
    x[rows + n] = r;
  }
  const float* writes[2 * kChunkRows];
  for (int j = 0; j < chunk.last; ++j) {
    writes[2 * j] = chunk.v[j];
    writes[2 * j + 1] = chunk.u[j];
  }
  float* const keys = chunk.scratch + 2 * kChunkRows * stride;
  float* const left = keys + 2 * kChunkRows * stride;
  if (chunk.state_out != nullptr) decay_to_end(chunk, stride, keys, left);
  const StateWrite write = {chunk.state, chunk.state_out, chunk.padded_dim, left,          1,
                            keys,        stride,          writes,           2 * chunk.last};
  each_strip(chunk.padded_dim, 2 * rows <= kFewRows, [&]<int kCols>(int64_t at) {
    alignas(64) float read[(kCols > kTileCols ? kFewRows : 2 * kChunkRows) * kCols * kLanes];
    if (chunk.state != nullptr)
      read_strip<kCols>(chunk.state + at, chunk.key_dim, chunk.padded_dim, x, 2 * rows, read);
    strip_rows<kCols>(chunk, weights, writes, chunk.state != nullptr ? read : nullptr, at);
    if (chunk.state_out != nullptr) write_strip<kCols>(write, chunk.key_dim, at);
  });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
