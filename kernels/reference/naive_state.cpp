#include "kernels/reference/naive_state.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "kernels/reference/state_store.h"

namespace millrace::reference {
namespace {

using Kind = StateMix::Kind;
using Doubles = std::vector<double>;

double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu(double x) { return x * logistic(x); }

Doubles convolve(const StateMix& op, const int32_t* table, int32_t position) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  Doubles y(static_cast<size_t>(s.channels()));
  const auto weights = [&](int64_t c) {
    if (op.conv_keys == nullptr || c < s.keys()) return op.conv + c * s.taps;
    return c < 2 * s.keys() ? op.conv_keys + (c - s.keys()) * s.taps
                            : op.conv_values + (c - 2 * s.keys()) * s.taps;
  };
  for (int64_t c = 0; c < s.channels(); ++c) {
    double sum = op.conv_bias == nullptr ? 0.0 : op.conv_bias[c];
    for (int32_t t = 0; t < s.taps; ++t) {
      const int32_t from = position - s.taps + 1 + t;
      const float* block = block_of(op, table, from);
      MILLRACE_CHECK(block != nullptr || from < 0);
      if (block != nullptr)
        sum +=
            static_cast<double>(weights(c)[t]) * block[at.inputs + from % kBlockTokens * at.row_inputs + c];
    }
    y[static_cast<size_t>(c)] = op.conv_silu ? silu(sum) : sum;
  }
  return y;
}

void norm_to_length(double* x, int32_t size, double length) {
  double squares = 0.0;
  for (int32_t i = 0; i < size; ++i) squares += x[i] * x[i];
  for (int32_t i = 0; i < size; ++i) x[i] *= length / std::sqrt(squares + 1e-6);
}

// Writes the token's keys, values and gates where later tokens find them.
void keep_row(const StateMix& op, float* block, int32_t row, const float* mix, const Doubles& x) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  for (int64_t i = 0; i < s.keys(); ++i)
    block[at.keys + row * at.row_keys + i] = static_cast<float>(x[static_cast<size_t>(s.key_at() + i)]);
  const auto step_of = [&](int64_t i) {
    const double biased = mix[s.step_at() + i] + (op.step_bias == nullptr ? 0.0 : op.step_bias[i]);
    return biased > 20.0 ? biased : std::log1p(std::exp(biased));
  };
  const int64_t per_head = s.steps() / s.value_heads;
  for (int32_t h = 0; h < s.value_heads; ++h) {
    double step = step_of(h * per_head);
    const bool scan = op.kind == Kind::kSelectiveScan;
    if (scan) step = std::clamp<double>(step, op.step_min, op.step_max);
    for (int64_t i = h * per_head; i < (h + 1) * per_head; ++i)
      block[at.decays + row * at.row_decays + i] = static_cast<float>(op.a[h] * (scan ? step : step_of(i)));
    block[at.betas + row * at.row_betas + h] =
        static_cast<float>(scan ? step : logistic(mix[s.beta_at() + h]));
    for (int32_t i = 0; i < s.value_dim; ++i) {
      const double v = x[static_cast<size_t>(s.value_at() + h * s.value_dim + i)];
      block[at.writes + row * at.row_writes + h * at.padded_dim + i] =
          static_cast<float>(scan ? v * step : v);
    }
  }
}

// state = the state behind one more token
void advance(const StateMix& op, const float* block, int32_t row, int32_t head, Doubles& state) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  const float* k = block + at.keys + row * at.row_keys + s.key_head(head) * s.key_dim;
  const float* v = block + at.writes + row * at.row_writes + head * at.padded_dim;
  const double beta = block[at.betas + row * at.row_betas + head];
  for (int32_t d = 0; d < s.key_dim; ++d) {
    const int64_t step = s.channel_decay ? int64_t{head} * s.key_dim + d : head;
    const double decay = std::exp(static_cast<double>(block[at.decays + row * at.row_decays + step]));
    for (int32_t i = 0; i < s.value_dim; ++i) state[static_cast<size_t>(d * s.value_dim + i)] *= decay;
  }
  for (int32_t i = 0; i < s.value_dim; ++i) {
    double known = 0.0;
    for (int32_t d = 0; d < s.key_dim; ++d) known += state[static_cast<size_t>(d * s.value_dim + i)] * k[d];
    const double write = op.kind == Kind::kGatedDelta ? (v[i] - known) * beta : v[i];
    for (int32_t d = 0; d < s.key_dim; ++d) state[static_cast<size_t>(d * s.value_dim + i)] += k[d] * write;
  }
}

Doubles state_at(const StateMix& op, const int32_t* table, int32_t position, int32_t head) {
  const int32_t first = position / kBlockTokens * kBlockTokens;
  Doubles state = state_before(op, table, first, head);
  for (int32_t p = first; p <= position; ++p)
    advance(op, block_of(op, table, p), p % kBlockTokens, head, state);
  return state;
}

void gate_and_norm(const StateMix& op, const float* mix, Doubles& y) {
  const StateShape& s = op.shape;
  const auto gate = [&] {
    for (int64_t i = 0; i < s.values(); ++i) {
      const double g = mix[s.gate_at() + i];
      y[static_cast<size_t>(i)] *= op.gate_sigmoid ? logistic(g) : silu(g);
    }
  };
  if (!op.norm_before_gate) gate();
  for (int64_t c = 0; op.norm != nullptr && c < s.values(); c += op.norm_size) {
    double squares = 0.0;
    double* of = y.data() + c;
    for (int64_t i = 0; i < op.norm_size; ++i) squares += of[i] * of[i];
    const double by = 1.0 / std::sqrt(squares / static_cast<double>(op.norm_size) + op.norm_eps);
    const float* weight = op.kind == Kind::kGatedDelta ? op.norm : op.norm + c;
    for (int64_t i = 0; i < op.norm_size; ++i) of[i] *= by * weight[i];
  }
  if (op.norm_before_gate) gate();
}

}  // namespace

void state_mix(const StateMix& op, const int32_t* table, int32_t position, const float* mix, float* out) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  const int32_t row = position % kBlockTokens;
  float* block = block_of(op, table, position);
  MILLRACE_CHECK(block != nullptr);
  std::copy_n(mix, s.channels(), block + at.inputs + row * at.row_inputs);
  Doubles x = convolve(op, table, position);
  if (op.kind == Kind::kConvolution) {
    for (int64_t i = 0; i < s.values(); ++i)
      out[i] = static_cast<float>(mix[s.gate_at() + i] * x[static_cast<size_t>(i)]);
    return;
  }
  for (int32_t h = 0; op.kind == Kind::kGatedDelta && h < s.key_heads; ++h) {
    norm_to_length(x.data() + s.query_at() + h * s.key_dim, s.key_dim, 1.0 / std::sqrt(s.key_dim));
    norm_to_length(x.data() + s.key_at() + h * s.key_dim, s.key_dim, 1.0);
  }
  keep_row(op, block, row, mix, x);
  Doubles y(static_cast<size_t>(s.values()), 0.0);
  for (int32_t h = 0; h < s.value_heads; ++h) {
    const Doubles state = state_at(op, table, position, h);
    const double* q = x.data() + s.query_at() + s.key_head(h) * s.key_dim;
    for (int32_t i = 0; i < s.value_dim; ++i) {
      double& to = y[static_cast<size_t>(h * s.value_dim + i)];
      for (int32_t d = 0; d < s.key_dim; ++d) to += q[d] * state[static_cast<size_t>(d * s.value_dim + i)];
      if (op.d != nullptr) to += op.d[h] * x[static_cast<size_t>(s.value_at() + h * s.value_dim + i)];
    }
    if (row + 1 == kBlockTokens) keep_state(s, state, h, block);
  }
  gate_and_norm(op, mix, y);
  std::transform(y.begin(), y.end(), out, [](double v) { return static_cast<float>(v); });
}

}  // namespace millrace::reference
