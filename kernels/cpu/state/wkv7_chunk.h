// RWKV 7: the rows of a chunk and the state behind it (wkv7_task.h says what is computed,
// docs/kernels/state_space.md why so).
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/state/state_chunk.h"
#include "kernels/cpu/state/wkv7_task.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// What rows before it are to a row: of v_j and u_j in its u and in its output.
struct Wkv7Weights {
  float ak[kChunkRows], ab[kChunkRows], rk[kChunkRows], rb[kChunkRows];
};

inline V16 load_some(const float* from, int64_t count) {
  return count >= kLanes ? Simd::load(from) : load_tail<LoadF32>(from, count);
}

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
  to.ak[j] = Simd::reduce_sum(ak);
  to.ab[j] = Simd::reduce_sum(ab);
  to.rk[j] = Simd::reduce_sum(rk);
  to.rb[j] = Simd::reduce_sum(rb);
}

// The same of the row itself, which only its output reads.
inline void weigh_own(const Wkv7Chunk& chunk, int i, float* r, Wkv7Weights& to) {
  const int64_t size = chunk.key_dim;
  to.rk[i] = key_dot(r, chunk.k[i], size);
  to.rb[i] = key_dot(r, chunk.b[i], size);
  for (int64_t c = 0; c < size; c += kLanes)
    Simd::store(r + c, Simd::mul(Simd::load(r + c), load_some(chunk.decay[i] + c, size - c)));
}

inline void next_wkv7_state(const Wkv7Chunk& chunk, int64_t stride) {
  const int64_t keys = chunk.key_dim, size = chunk.padded_dim;
  float* const left = chunk.decayed + 2 * kChunkRows * stride;
  for (int64_t c = 0; c < keys; c += kLanes) Simd::store(left + c, Simd::broadcast(1.0f));
  for (int j = chunk.last - 1; j >= 0; --j) {
    float* const k = chunk.decayed + 2 * j * stride;
    float* const b = k + stride;
    for (int64_t c = 0; c < keys; c += kLanes) {
      const V16 by = Simd::load(left + c);
      Simd::store(k + c, Simd::mul(by, load_some(chunk.k[j] + c, keys - c)));
      Simd::store(b + c, Simd::mul(by, load_some(chunk.b[j] + c, keys - c)));
      Simd::store(left + c, Simd::mul(by, load_some(chunk.decay[j] + c, keys - c)));
    }
  }
  for (int64_t d = 0; d < keys; ++d) {
    const V16 all = Simd::broadcast(left[d]);
    for (int64_t c = 0; c < size; c += kLanes) {
      V16 s = chunk.state == nullptr ? Simd::zero() : Simd::mul(all, Simd::load(chunk.state + d * size + c));
      for (int j = 0; j < chunk.last; ++j) {
        const float* const k = chunk.decayed + 2 * j * stride + d;
        s = Simd::fma(Simd::broadcast(k[0]), Simd::load(chunk.v[j] + c), s);
        s = Simd::fma(Simd::broadcast(k[stride]), Simd::load(chunk.u[j] + c), s);
      }
      Simd::store(chunk.state_out + d * size + c, s);
    }
  }
}

void wkv7_chunk(const Wkv7Chunk& chunk) {
  const int64_t size = chunk.padded_dim, stride = (chunk.key_dim + kLanes - 1) / kLanes * kLanes;
  const int rows = chunk.last - chunk.first;
  Wkv7Weights weights[kChunkRows];
  const float* x[2 * kChunkRows];
  float* read[2 * kChunkRows];
  for (int n = 0; n < rows; ++n) {
    const int i = chunk.first + n;
    float* const a = chunk.decayed + n * stride;
    float* const r = chunk.decayed + (kChunkRows + n) * stride;
    copy_padded(chunk.a[i], chunk.key_dim, a);
    copy_padded(chunk.r[i], chunk.key_dim, r);
    weigh_own(chunk, i, r, weights[n]);
    for (int j = i - 1; j >= 0; --j) weigh_row(chunk, j, a, r, weights[n]);
    x[n] = a;
    x[rows + n] = r;
    read[n] = chunk.scratch + n * size;
    read[rows + n] = chunk.scratch + (kChunkRows + n) * size;
  }
  if (chunk.state != nullptr) read_state_rows(chunk.state, chunk.key_dim, size, x, read, 2 * rows);
  for (int n = 0; n < rows; ++n) {
    const int i = chunk.first + n;
    const bool known = chunk.state != nullptr;
    set_scaled(chunk.u[i], 1.0f, known ? read[n] : nullptr, size);
    for (int j = 0; j < i; ++j) {
      add_scaled(chunk.u[i], weights[n].ak[j], chunk.v[j], size);
      add_scaled(chunk.u[i], weights[n].ab[j], chunk.u[j], size);
    }
    set_scaled(chunk.o[i], 1.0f, known ? read[rows + n] : nullptr, size);
    for (int j = 0; j <= i; ++j) {
      add_scaled(chunk.o[i], weights[n].rk[j], chunk.v[j], size);
      add_scaled(chunk.o[i], weights[n].rb[j], chunk.u[j], size);
    }
  }
  if (chunk.state_out != nullptr) next_wkv7_state(chunk, stride);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
