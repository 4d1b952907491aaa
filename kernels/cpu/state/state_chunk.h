// Layers with a state: the rows of a chunk and the state behind it; the short convolution before them
// (state_task.h says what is computed, docs/kernels/state_space.md why so).
#pragma once

#include <stdint.h>

#include "kernels/cpu/elementwise/elementwise.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/state/state_task.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline float key_dot(const float* a, const float* b, int64_t size) {
  V16 sum = Simd::zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum = Simd::fma(Simd::load(a + i), Simd::load(b + i), sum);
  if (i < size)
    sum = Simd::fma(load_tail<LoadF32>(a + i, size - i), load_tail<LoadF32>(b + i, size - i), sum);
  return Simd::reduce_sum(sum);
}

// y[d] = x[d] exp(log[d] - other[d]); without `other` exp(log[d]).
inline void decay_keys(const float* x, const float* log, const float* other, int64_t size, float* y) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = size - i < kLanes ? size - i : static_cast<int64_t>(kLanes);
    const auto load = [&](const float* from) {
      return count == kLanes ? Simd::load(from + i) : load_tail<LoadF32>(from + i, count);
    };
    V16 by = load(log);
    if (other != nullptr) by = Simd::sub(by, load(other));
    const V16 product = Simd::mul(load(x), exp16(by));
    float last[kLanes];
    Simd::store(count == kLanes ? y + i : last, product);
    if (count < kLanes) __builtin_memcpy(y + i, last, static_cast<size_t>(count) * sizeof(float));
  }
}

// x . k_j at row i, with what is left of each dimension by then; between[i][j] has the rest.
inline float decayed_dot(const StateChunk& chunk, const float* x, int i, int j) {
  if (chunk.logs[0] == nullptr) return key_dot(x, chunk.k[j], chunk.key_dim);
  decay_keys(x, chunk.logs[i], chunk.logs[j], chunk.key_dim, chunk.decayed);
  return key_dot(chunk.decayed, chunk.k[j], chunk.key_dim);
}

// out[r] = S^T x[r] for kRows rows that share the loads of S, sixteen columns at a time.
template <int kRows>
void read_state(const float* state, int64_t key_dim, int64_t padded, const float* const* x,
                float* const* out) {
  for (int64_t c = 0; c < padded; c += kLanes) {
    V16 sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = Simd::zero();
    for (int64_t d = 0; d < key_dim; ++d) {
      const V16 s = Simd::load(state + d * padded + c);
      for (int r = 0; r < kRows; ++r) sum[r] = Simd::fma(Simd::broadcast(x[r][d]), s, sum[r]);
    }
    for (int r = 0; r < kRows; ++r) Simd::store(out[r] + c, sum[r]);
  }
}

inline void read_state_rows(const float* state, int64_t key_dim, int64_t padded, const float* const* x,
                            float* const* out, int rows) {
  constexpr int kRowsAtOnce = 4;  // four sums of two registers each, where a register has eight lanes
  int r = 0;
  for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce)
    read_state<kRowsAtOnce>(state, key_dim, padded, x + r, out + r);
  for (; r < rows; ++r) read_state<1>(state, key_dim, padded, x + r, out + r);
}

// y += by * x
inline void add_scaled(float* y, float by, const float* x, int64_t size) {
  const V16 all = Simd::broadcast(by);
  for (int64_t c = 0; c < size; c += kLanes)
    Simd::store(y + c, Simd::fma(all, Simd::load(x + c), Simd::load(y + c)));
}

// y = by * x, or zeros without x
inline void set_scaled(float* y, float by, const float* x, int64_t size) {
  const V16 all = Simd::broadcast(by);
  for (int64_t c = 0; c < size; c += kLanes)
    Simd::store(y + c, x == nullptr ? Simd::zero() : Simd::mul(all, Simd::load(x + c)));
}

inline void write_row(const StateChunk& chunk, int i, const float* read_key) {
  const int64_t size = chunk.padded_dim;
  float* w = chunk.w[i];
  for (int64_t c = 0; c < size; c += kLanes) Simd::store(w + c, Simd::load(chunk.v[i] + c));
  if (!chunk.delta) return;
  if (read_key != nullptr) add_scaled(w, -chunk.decay[i], read_key, size);
  for (int j = 0; j < i; ++j) {
    const float by = decayed_dot(chunk, chunk.k[i], i, j) * chunk.between[i][j];
    add_scaled(w, -by, chunk.w[j], size);
  }
  set_scaled(w, chunk.beta[i], w, size);
}

inline void output_row(const StateChunk& chunk, int i, const float* read_query) {
  const int64_t size = chunk.padded_dim;
  float* o = chunk.o[i];
  set_scaled(o, chunk.decay[i], read_query, size);
  for (int j = 0; j <= i; ++j) {
    const float by = decayed_dot(chunk, chunk.q[i], i, j) * chunk.between[i][j];
    add_scaled(o, by, chunk.w[j], size);
  }
}

inline void next_state(const StateChunk& chunk) {
  const int64_t size = chunk.padded_dim;
  V16 left = Simd::broadcast(chunk.decay[kChunkRows - 1]);
  const float* const* keys = chunk.k;
  const float* decayed[kChunkRows];
  float* all_left = nullptr;
  if (chunk.logs[0] != nullptr) {
    all_left = chunk.decayed + kChunkRows * static_cast<int64_t>(chunk.key_dim);
    const float* const last = chunk.logs[kChunkRows - 1];
    for (int j = 0; j < kChunkRows; ++j) {
      float* const key = chunk.decayed + j * static_cast<int64_t>(chunk.key_dim);
      decay_keys(chunk.k[j], last, chunk.logs[j], chunk.key_dim, key);
      decayed[j] = key;
    }
    keys = decayed;
    for (int64_t d = 0; d < chunk.key_dim; ++d) all_left[d] = 1.0f;
    decay_keys(all_left, last, nullptr, chunk.key_dim, all_left);
  }
  for (int64_t d = 0; d < chunk.key_dim; ++d) {
    V16 by[kChunkRows];
    for (int j = 0; j < kChunkRows; ++j)
      by[j] = Simd::broadcast(chunk.between[kChunkRows - 1][j] * keys[j][d]);
    if (chunk.logs[0] != nullptr) left = Simd::broadcast(all_left[d]);
    for (int64_t c = 0; c < size; c += kLanes) {
      V16 s = chunk.state == nullptr ? Simd::zero() : Simd::mul(left, Simd::load(chunk.state + d * size + c));
      for (int j = 0; j < kChunkRows; ++j) s = Simd::fma(by[j], Simd::load(chunk.w[j] + c), s);
      Simd::store(chunk.state_out + d * size + c, s);
    }
  }
}

void state_chunk(const StateChunk& chunk) {
  const float* x[2 * kChunkRows];
  float* read[2 * kChunkRows];
  int rows = 0;
  for (int i = chunk.first; i < chunk.last; ++i, ++rows) x[rows] = chunk.q[i];
  const int queries = rows;
  for (int i = chunk.first; chunk.delta && i < chunk.last; ++i, ++rows) x[rows] = chunk.k[i];
  for (int r = 0; r < rows; ++r) read[r] = chunk.scratch + r * static_cast<int64_t>(chunk.padded_dim);
  if (chunk.state != nullptr && chunk.logs[0] != nullptr) {
    for (int r = 0; r < rows; ++r) {
      float* const to = chunk.decayed + r * static_cast<int64_t>(chunk.key_dim);
      decay_keys(x[r], chunk.logs[chunk.first + r % queries], nullptr, chunk.key_dim, to);
      x[r] = to;
    }
  }
  if (chunk.state != nullptr) read_state_rows(chunk.state, chunk.key_dim, chunk.padded_dim, x, read, rows);
  for (int i = chunk.first; i < chunk.last; ++i) {
    const int r = i - chunk.first;
    write_row(chunk, i, chunk.state != nullptr && chunk.delta ? read[queries + r] : nullptr);
    output_row(chunk, i, chunk.state != nullptr ? read[r] : nullptr);
  }
  if (chunk.state_out != nullptr) next_state(chunk);
}

// Sixteen channels at a time, their weights turned around once for all rows.
inline void short_conv16(const ShortConvRows& op, int64_t first, int64_t count) {
  float turned[kChunkRows + 1][kLanes] = {}, bias[kLanes] = {};
  for (int64_t c = 0; c < count; ++c) {
    for (int t = 0; t < op.taps; ++t) turned[t][c] = op.weight[(first + c) * op.taps + t];
    if (op.bias != nullptr) bias[c] = op.bias[first + c];
  }
  for (int64_t r = 0; r < op.rows; ++r) {
    V16 sum = Simd::load(bias);
    for (int t = 0; t < op.taps; ++t) {
      const float* x = op.x[r + t];
      if (x == nullptr) continue;
      const V16 in = count == kLanes ? Simd::load(x + first) : load_tail<LoadF32>(x + first, count);
      sum = Simd::fma(Simd::load(turned[t]), in, sum);
    }
    if (op.silu) sum = Simd::mul(sum, sigmoid16(sum));
    float last[kLanes];
    float* y = op.y + r * op.y_stride + first;
    Simd::store(count == kLanes ? y : last, sum);
    if (count < kLanes) __builtin_memcpy(y, last, static_cast<size_t>(count) * sizeof(float));
  }
}

void short_conv(const ShortConvRows& op, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; c += kLanes)
    short_conv16(op, c, last - c < kLanes ? last - c : static_cast<int64_t>(kLanes));
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
