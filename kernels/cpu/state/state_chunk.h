// Layers with a state: the rows of a chunk and the state behind it; the short convolution before them
// (state_task.h says what is computed, docs/kernels/state_space.md why so).
#pragma once

#include <stdint.h>

#include "kernels/cpu/elementwise/elementwise.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/state/gates.h"
#include "kernels/cpu/state/state_task.h"
#include "kernels/cpu/state/state_tiles.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// e_i and e(i, j); with logs of each dimension 1.
struct Decays {
  float of_state[kChunkRows];
  alignas(64) float between[kChunkRows][kChunkRows];
};

// What rows before it are to a row: weights of their w in its own, below zero, and in its output.
struct RowWeights {
  float write[kChunkRows], output[kChunkRows];
};

// Of the rows to compute and of the last, which the next state is made of.
inline void decays_of(const StateChunk& chunk, Decays& to) {
  alignas(64) double x[kChunkRows];
  if (chunk.logs[0] != nullptr) {
    for (int i = 0; i < kChunkRows; ++i) {
      to.of_state[i] = 1.0f;
      for (int j = 0; j < kChunkRows; ++j) to.between[i][j] = 1.0f;
    }
    return;
  }
  for (int i = 0; i < kChunkRows; ++i) x[i] = chunk.log[i];
  exp_rounded(x, to.of_state);
  const auto row = [&](int i) {
    for (int j = 0; j < kChunkRows; ++j)
      x[j] = j <= i ? static_cast<double>(chunk.log[i]) - chunk.log[j] : 0.0;
    exp_rounded(x, to.between[i]);
  };
  for (int i = chunk.first; i < chunk.last; ++i) row(i);
  if (chunk.last < kChunkRows && chunk.state_out != nullptr) row(kChunkRows - 1);
}

// to[d] = x[d] by, the last vector's rest zeros or of no use.
inline void scale_keys(const float* x, float by, int64_t size, float* to) {
  const V16 all = Simd::broadcast(by);
  for (int64_t i = 0; i < size; i += kLanes) Simd::store(to + i, Simd::mul(all, load_some(x + i, size - i)));
}

inline void weigh_row(const StateChunk& chunk, const Decays& decays, int i, RowWeights& to) {
  for (int j = 0; j <= i; ++j) {
    to.output[j] = key_dot(chunk.q[i], chunk.k[j], chunk.key_dim) * decays.between[i][j];
    if (chunk.delta && j < i)
      to.write[j] = -(key_dot(chunk.k[i], chunk.k[j], chunk.key_dim) * decays.between[i][j]);
  }
}

// The same with what is left of each dimension of a key, which query and key of a row share.
inline void weigh_row_by_logs(const StateChunk& chunk, int i, RowWeights& to) {
  const int64_t size = chunk.key_dim;
  for (int j = 0; j <= i; ++j) {
    V16 output = Simd::zero(), write = Simd::zero();
    for (int64_t d = 0; d < size; d += kLanes) {
      const auto load = [&](const float* from) { return load_some(from + d, size - d); };
      const V16 left = exp16(Simd::sub(load(chunk.logs[i]), load(chunk.logs[j])));
      const V16 key = load(chunk.k[j]);
      output = Simd::fma(Simd::mul(load(chunk.q[i]), left), key, output);
      if (chunk.delta) write = Simd::fma(Simd::mul(load(chunk.k[i]), left), key, write);
    }
    to.output[j] = Simd::reduce_sum(output);
    if (chunk.delta && j < i) to.write[j] = -Simd::reduce_sum(write);
  }
}

// What the state behind a chunk is made of: keys as far as they are left there, in chunk.scratch; with logs
// the scratch of the 33rd row on has them and what is left of each row of the state.
struct NextState {
  const float *keys, *left;
  int64_t left_step;
};

inline NextState decay_to_end(const StateChunk& chunk, const Decays& decays, int64_t stride) {
  if (chunk.logs[0] == nullptr) {
    for (int j = 0; j < kChunkRows; ++j)
      scale_keys(chunk.k[j], decays.between[kChunkRows - 1][j], chunk.key_dim, chunk.scratch + j * stride);
    return {chunk.scratch, &decays.of_state[kChunkRows - 1], 0};
  }
  float* const keys = chunk.scratch + 2 * kChunkRows * stride;
  float* const left = keys + kChunkRows * stride;
  const float* const last = chunk.logs[kChunkRows - 1];
  for (int64_t d = 0; d < chunk.key_dim; d += kLanes) {
    const auto load = [&](const float* from) { return load_some(from + d, chunk.key_dim - d); };
    for (int j = 0; j < kChunkRows; ++j) {
      const V16 key = Simd::mul(load(chunk.k[j]), exp16(Simd::sub(load(last), load(chunk.logs[j]))));
      Simd::store(keys + j * stride + d, key);
    }
    Simd::store(left + d, exp16(load(last)));
  }
  return {keys, left, 1};
}

// Queries and keys as far as the first state is left at their row.
inline void decay_from_start(const StateChunk& chunk, int i, float* query, float* key) {
  for (int64_t d = 0; d < chunk.key_dim; d += kLanes) {
    const auto load = [&](const float* from) { return load_some(from + d, chunk.key_dim - d); };
    const V16 left = exp16(load(chunk.logs[i]));
    Simd::store(query + d, Simd::mul(load(chunk.q[i]), left));
    if (key != nullptr) Simd::store(key + d, Simd::mul(load(chunk.k[i]), left));
  }
}

// Rows of one strip from what they read of the state: [queries, then keys][16 kCols], or null.
template <int kCols>
inline void strip_rows(const StateChunk& chunk, const Decays& decays, const RowWeights* weights,
                       const float* read, int64_t at) {
  constexpr int64_t kRow = kCols * kLanes;
  const int rows = chunk.last - chunk.first;
  for (int i = chunk.first; i < chunk.last; ++i) {
    V16 w[kCols];
    for (int c = 0; c < kCols; ++c) w[c] = Simd::load(chunk.v[i] + at + c * kLanes);
    if (chunk.delta) {
      if (read != nullptr) {
        const float* const key = read + (rows + i - chunk.first) * kRow;
        const V16 by = Simd::broadcast(-decays.of_state[i]);
        for (int c = 0; c < kCols; ++c) w[c] = Simd::fma(by, Simd::load(key + c * kLanes), w[c]);
      }
      add_terms<kCols>(w, weights[i].write, chunk.w, i, at);
      for (int c = 0; c < kCols; ++c) w[c] = Simd::mul(Simd::broadcast(chunk.beta[i]), w[c]);
    }
    for (int c = 0; c < kCols; ++c) Simd::store(chunk.w[i] + at + c * kLanes, w[c]);
  }
  for (int i = chunk.first; i < chunk.last; ++i) {
    V16 o[kCols];
    for (int c = 0; c < kCols; ++c) {
      o[c] = Simd::zero();
      if (read == nullptr) continue;
      o[c] = Simd::mul(Simd::broadcast(decays.of_state[i]),
                       Simd::load(read + (i - chunk.first) * kRow + c * kLanes));
    }
    add_terms<kCols>(o, weights[i].output, chunk.w, i + 1, at);
    for (int c = 0; c < kCols; ++c) Simd::store(chunk.o[i] + at + c * kLanes, o[c]);
  }
}

void state_chunk(const StateChunk& chunk) {
  const int64_t stride = whole_vectors(chunk.key_dim);
  const bool logs = chunk.logs[0] != nullptr;
  const int rows = chunk.last - chunk.first, read_rows = chunk.delta ? 2 * rows : rows;
  const float* x[2 * kChunkRows];
  RowWeights weights[kChunkRows];
  Decays decays;
  decays_of(chunk, decays);
  for (int n = 0; n < rows; ++n) {
    const int i = chunk.first + n;
    x[n] = chunk.q[i];
    if (chunk.delta) x[rows + n] = chunk.k[i];
    if (!logs) {
      weigh_row(chunk, decays, i, weights[i]);
      continue;
    }
    weigh_row_by_logs(chunk, i, weights[i]);
    if (chunk.state == nullptr) continue;
    float* const query = chunk.scratch + n * stride;
    float* const key = chunk.delta ? chunk.scratch + (rows + n) * stride : nullptr;
    decay_from_start(chunk, i, query, key);
    x[n] = query;
    if (chunk.delta) x[rows + n] = key;
  }
  NextState next{};
  if (chunk.state_out != nullptr) next = decay_to_end(chunk, decays, stride);
  const StateWrite write = {chunk.state, chunk.state_out, chunk.padded_dim, next.left, next.left_step,
                            next.keys,   stride,          chunk.w,          kChunkRows};
  each_strip(chunk.padded_dim, read_rows <= kFewRows, [&]<int kCols>(int64_t at) {
    alignas(64) float read[(kCols > kTileCols ? kFewRows : 2 * kChunkRows) * kCols * kLanes];
    if (chunk.state != nullptr)
      read_strip<kCols>(chunk.state + at, chunk.key_dim, chunk.padded_dim, x, read_rows, read);
    strip_rows<kCols>(chunk, decays, weights, chunk.state != nullptr ? read : nullptr, at);
    if (chunk.state_out != nullptr) write_strip<kCols>(write, chunk.key_dim, at);
  });
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
