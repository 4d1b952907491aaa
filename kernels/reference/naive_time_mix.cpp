#include "kernels/reference/naive_time_mix.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "kernels/reference/state_store.h"

namespace millrace::reference {
namespace {

using Doubles = std::vector<double>;

double gate_logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Writes the token's keys, values and decays where later tokens find them; returns its a, [keys].
Doubles keep_row(const TimeMix& op, float* block, int32_t row, const TimeMixToken& t) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  float* keys = block + at.keys + row * at.row_keys;
  Doubles a(static_cast<size_t>(s.keys()));
  for (int32_t h = 0; h < s.key_heads; ++h) {
    double squares = 0.0;
    for (int64_t i = int64_t{h} * s.key_dim; i < int64_t{h + 1} * s.key_dim; ++i) {
      const double key = static_cast<double>(t.k[i]) * op.k_k[i];
      squares += key * key;
    }
    const double length = std::max(std::sqrt(squares), 1e-12);
    for (int64_t i = int64_t{h} * s.key_dim; i < int64_t{h + 1} * s.key_dim; ++i) {
      const double key = static_cast<double>(t.k[i]) * op.k_k[i] / length, rate = gate_logistic(t.rate[i]);
      a[static_cast<size_t>(i)] = -key;
      keys[i] = static_cast<float>(t.k[i] * (1.0 + (rate - 1.0) * op.k_a[i]));
      keys[s.keys() + i] = static_cast<float>(key * rate);
      block[at.decays + row * at.row_decays + i] =
          static_cast<float>(std::exp(-std::exp(-0.5) * gate_logistic(t.decay[i])));
    }
    for (int32_t i = 0; i < s.value_dim; ++i) {
      const int64_t from = int64_t{h} * s.value_dim + i;
      double v = t.v[from];
      if (op.first) {
        t.first_values[from] = t.v[from];
      } else {
        v += (t.first_values[from] - v) * gate_logistic(t.mixed[from]);
      }
      block[at.writes + row * at.row_writes + h * at.padded_dim + i] = static_cast<float>(v);
    }
  }
  return a;
}

// state = the state behind one more token, whose u = S^T a is known; without `a` of the block's.
void advance(const TimeMix& op, float* block, int32_t row, int32_t head, const double* a, Doubles& state) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  const float* k = block + at.keys + row * at.row_keys + int64_t{head} * s.key_dim;
  const float* b = k + s.keys();
  const float* decay = block + at.decays + row * at.row_decays + int64_t{head} * s.key_dim;
  float* v = block + at.writes + row * at.row_writes + head * at.padded_dim;
  float* u = v + s.value_heads * at.padded_dim;
  for (int32_t i = 0; i < s.value_dim; ++i) {
    const auto cell = [&](int32_t d) -> double& { return state[static_cast<size_t>(d * s.value_dim + i)]; };
    double read = u[i];
    if (a != nullptr) {
      read = 0.0;
      for (int32_t d = 0; d < s.key_dim; ++d) read += cell(d) * a[d];
      u[i] = static_cast<float>(read);
    }
    for (int32_t d = 0; d < s.key_dim; ++d)
      cell(d) = cell(d) * decay[d] + b[d] * read + static_cast<double>(k[d]) * v[i];
  }
}

Doubles state_at(const TimeMix& op, const int32_t* table, int32_t position, int32_t head, const double* a) {
  const int32_t first = position / kBlockTokens * kBlockTokens;
  Doubles state = state_before(op, table, first, head);
  for (int32_t p = first; p <= position; ++p)
    advance(op, block_of(op, table, p), p % kBlockTokens, head, p == position ? a : nullptr, state);
  return state;
}

}  // namespace

void time_mix(const TimeMix& op, const int32_t* table, int32_t position, const TimeMixToken& token) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  const int32_t row = position % kBlockTokens;
  float* block = block_of(op, table, position);
  MILLRACE_CHECK(block != nullptr);
  const Doubles a = keep_row(op, block, row, token);
  for (int32_t h = 0; h < s.value_heads; ++h) {
    const int64_t first = int64_t{h} * s.key_dim;
    const Doubles state = state_at(op, table, position, h, a.data() + first);
    const float *r = token.r + first, *k = block + at.keys + row * at.row_keys + first;
    const float* v = block + at.writes + row * at.row_writes + h * at.padded_dim;
    Doubles o(static_cast<size_t>(s.value_dim), 0.0);
    double mean = 0.0, variance = 0.0, own = 0.0;
    for (int32_t i = 0; i < s.value_dim; ++i) {
      double& to = o[static_cast<size_t>(i)];
      for (int32_t d = 0; d < s.key_dim; ++d) to += r[d] * state[static_cast<size_t>(d * s.value_dim + i)];
      mean += to / s.value_dim;
    }
    for (const double x : o) variance += (x - mean) * (x - mean) / s.value_dim;
    for (int32_t d = 0; d < s.key_dim; ++d) own += static_cast<double>(r[d]) * k[d] * op.r_k[first + d];
    for (int32_t i = 0; i < s.value_dim; ++i) {
      const int64_t to = int64_t{h} * s.value_dim + i;
      const double normed = (o[static_cast<size_t>(i)] - mean) / std::sqrt(variance + op.norm_eps);
      const double y = normed * op.norm[to] + op.norm_bias[to] + own * v[i];
      token.out[to] = static_cast<float>(y * token.gate[to]);
    }
    if (row + 1 == kBlockTokens) keep_state(s, state, h, block);
  }
}

void token_shift(const TimeMix& op, const int32_t* table, int32_t position, int place, const float* normed,
                 const float* by, int64_t count, float* to) {
  const StateBlock at(op.shape);
  const int64_t size = op.shape.keys();
  const auto row_of = [&](int32_t p) -> float* {
    float* block = block_of(op, table, p);
    if (block == nullptr) return nullptr;
    return block + at.inputs + p % kBlockTokens * at.row_inputs + place * size;
  };
  std::copy_n(normed, size, row_of(position));
  const float* before = row_of(position - 1);
  MILLRACE_CHECK(before != nullptr || position == 0);
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t i = 0; i < size; ++i) {
      const double was = before == nullptr ? 0.0 : before[i];
      to[n * size + i] = static_cast<float>(normed[i] + (was - normed[i]) * by[n * size + i]);
    }
  }
}

}  // namespace millrace::reference
