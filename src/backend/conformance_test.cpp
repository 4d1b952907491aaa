// Conformance: every operation x weight type x odd shape x device against `reference`. A bound is derived for
// each output from what was multiplied, never guessed: rounding of sums grows with sum |w||x|, quantized
// activations are off by at most half a step, amax / 254 per element of their block of 32, or up to twice
// that where their scales are powers of two. A GPU multiplies bf16 by bf16 (as transformers does with a model
// in bf16): activations are off by 2^-9, and so are weights of types that no bf16 holds, twice where the
// scale is rounded before the product.
#include <gtest/gtest.h>

#include <limits>

#include "backend/reference/reference_backend.h"
#include "backend/test_support.h"
#include "base/error.h"
#include "base/float_bits.h"

namespace millrace {
namespace {

using namespace testing_support;

constexpr double kEps = 0x1p-24;  // half an ulp of 1

// ---------------------------------------------------------------- bounds

// MXFP4 on `amx`: a scale may be as large as amax / 64.
bool has_binary_scales(const std::string& device, DType type) {
  return device == "amx" && (type == DType::kMXFP4 || type == DType::kMXFP4Split);
}
double steps_per_amax = 127;  // of the device and type under test, at least

// Whether the device under test rounds both operands of a product to bf16: the last Pair's.
bool rounds_to_bf16 = false;

// |computed - exact| of w . x on a device, w exact, x exact.
double product_bound(DType type, const std::vector<float>& w, const float* x) {
  double bound = 0, magnitude = 0;
  const auto cols = static_cast<int64_t>(w.size());
  for (int64_t c = 0; c < cols; ++c) magnitude += std::fabs(static_cast<double>(w[c]) * x[c]);
  if (rounds_to_bf16 && type != DType::kF32 && cols % 32 == 0) {
    // Tensor cores cut what does not fit a float32 sum, where rounding would lose half of that.
    const double sums = 2 * kEps * static_cast<double>(cols / 16 + 8);
    double minima = 0;
    for (int64_t c = 0; minimum_error(type) > 0 && c < cols; ++c)
      minima += minimum_error(type) * largest_of_block(w.data(), c) * std::fabs(static_cast<double>(x[c]));
    return (1.01 * (0x1p-8 + weight_error(type)) + sums) * magnitude + 1.01 * minima;
  }
  if (is_float(type)) return kEps * static_cast<double>(cols / 16 + 8) * magnitude;
  for (int64_t b = 0; b < cols; b += 32) {
    double most = 0, weights = 0, spread = 0;
    for (int64_t c = b; c < b + 32; ++c) {
      most = std::max(most, std::fabs(static_cast<double>(x[c])));
      weights += std::fabs(static_cast<double>(w[c]));
      spread = std::max(spread, std::fabs(static_cast<double>(w[c])));
    }
    bound += most / (2 * steps_per_amax) * weights * (1 + 1e-5);
    // Types with a minimum add two terms of up to max|w| each, which may cancel.
    magnitude += 2 * 32 * spread * most;
  }
  return bound + kEps * static_cast<double>(cols / 16 + 8) * magnitude;
}

// What an error of each x costs in w . x.
double carried(const std::vector<float>& w, const std::vector<double>& error) {
  double sum = 0;
  for (size_t c = 0; c < w.size(); ++c) sum += std::fabs(static_cast<double>(w[c])) * error[c];
  return sum;
}

void expect_within(const std::vector<float>& got, const std::vector<float>& want,
                   const std::vector<double>& bound, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  ASSERT_EQ(got.size(), bound.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::fabs(static_cast<double>(got[i]) - want[i]), bound[i])
        << what << " [" << i << "]: got " << got[i] << ", reference " << want[i];
  }
}

// ---------------------------------------------------------------- one operation on both sides

struct Pair {
  std::unique_ptr<Backend> reference = make_reference_backend();
  Backend& device;
  std::vector<WeightPtr> kept;
  std::unique_ptr<Executor> want, got;

  explicit Pair(Backend& d, ExecutorSpec spec) : device(d) {
    rounds_to_bf16 = d.name() == "cuda";
    got = device.make_executor(spec);
    // The reference rounds as caches of one byte do; wider ones are held to a bound.
    if (spec.kv_type != DType::kQ8_0 && spec.kv_type != DType::kF8E4M3) spec.kv_type = DType::kF32;
    want = reference->make_executor(spec);
  }
  // The weight on the reference and on the device.
  std::pair<const Weight*, const Weight*> load(const OwnedTensor& t, WeightUse use) {
    kept.push_back(reference->load_weight(t.view, use));
    kept.push_back(device.load_weight(t.view, dequantized_where(device, t.view, use)));
    return {kept[kept.size() - 2].get(), kept.back().get()};
  }
  void begin(const Batch& batch) {
    want->begin(batch);
    got->begin(batch);
  }
  void write(Slot slot, const std::vector<float>& x) {
    want->write_slot(slot, x);
    got->write_slot(slot, x);
  }
};

// Linear layers on both sides.
struct LinearPair {
  Linear want, got;
  OwnedTensor weight, bias;
  LinearPair(Pair& pair, std::mt19937& random, DType type, int64_t rows, int64_t cols, bool with_bias,
             int64_t experts = 0) {
    weight = random_tensor(random, type, rows, cols, experts, 0.2f);
    std::tie(want.weight, got.weight) = pair.load(weight, WeightUse::kMatrix);
    if (with_bias) {
      bias = random_vector(random, rows * std::max<int64_t>(1, experts), 0.0f, 0.5f);
      std::tie(want.bias, got.bias) = pair.load(bias, WeightUse::kVector);
    }
  }
  float bias_at(int64_t i) const {
    return bias.bytes.empty() ? 0.0f : reinterpret_cast<const float*>(bias.bytes.data())[i];
  }
};

struct Flat {  // a batch of `rows` tokens of one fresh sequence, without a cache
  std::vector<int32_t> tokens, logit_rows;
  SequenceSlice slice;
  explicit Flat(int32_t rows) : tokens(static_cast<size_t>(rows), 0), slice{0, rows, 0, {}} {}
  Batch batch() const { return {tokens, {&slice, 1}, logit_rows}; }
};

ExecutorSpec base_spec(int32_t max_tokens, int32_t hidden) {
  ExecutorSpec spec;
  spec.max_tokens = max_tokens;
  spec.max_logit_rows = max_tokens;
  spec.max_context = std::max(64, max_tokens);
  spec.hidden = hidden;
  spec.heads = spec.kv_heads = 1;
  spec.head_dim = 32;
  spec.vocab = 16;
  return spec;
}

std::vector<int64_t> columns_for(DType type) {
  if (info(type).block_elements > 32) return {256, 768};
  if (info(type).block_elements == 32) return {32, 96, 288};
  return {1, 7, 16, 33, 100, 288};
}

class Conformance : public ::testing::TestWithParam<std::tuple<int, DType>> {
 protected:
  void SetUp() override {
    const auto index = static_cast<size_t>(std::get<0>(GetParam()));
    device_ = make_device(index);
    steps_per_amax = has_binary_scales(device_labels()[index], type()) ? 63.75 : 127;
  }
  DType type() const { return std::get<1>(GetParam()); }
  std::unique_ptr<Backend> device_;
};

// W x alone, through project_add with an empty residual.
void compare_product(Backend& device, std::mt19937& random, DType type, int32_t rows, int64_t cols,
                     int32_t m) {
  ExecutorSpec spec = base_spec(m, rows);
  spec.head_dim = static_cast<int32_t>(cols);
  Pair pair(device, spec);
  const LinearPair linear(pair, random, type, rows, cols, m % 2 == 1);
  Flat flat(m);
  pair.begin(flat.batch());
  std::vector<float> x = random_floats(random, static_cast<size_t>(m * cols));
  if (m > 2) std::fill_n(x.begin(), cols, 0.0f);  // a block of zeros has no scale
  pair.write(Slot::kAttention, x);
  pair.write(Slot::kResidual, std::vector<float>(static_cast<size_t>(m * rows), 0.0f));
  pair.want->project_add({linear.want});
  pair.got->project_add({linear.got});
  std::vector<double> bound(static_cast<size_t>(m * rows));
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<float> w = linear.weight.row(r);
    const double rest = 4 * kEps * std::fabs(linear.bias_at(r)) + 1e-30;
    for (int64_t i = 0; i < m; ++i) bound[i * rows + r] = product_bound(type, w, &x[i * cols]) + rest;
  }
  expect_within(pair.got->read_slot(Slot::kResidual), pair.want->read_slot(Slot::kResidual), bound,
                std::string(info(type).name) + " " + std::to_string(rows) + "x" + std::to_string(cols) +
                    " m " + std::to_string(m));
}

TEST_P(Conformance, MatrixProduct) {
  std::mt19937 random(1);
  for (int64_t cols : columns_for(type())) {
    for (int32_t rows : {1, 3, 4, 37}) {
      for (int32_t m : {1, 2, 3, 5, 15}) {
        compare_product(*device_, random, type(), rows, cols, m);
        if (HasFatalFailure()) return;
      }
    }
  }
  // Every tile a table may have, full and short: of activation rows, and of 16 and 64 rows of weights.
  const int64_t cols = columns_for(type()).back();
  for (int32_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 64, 100}) {
    compare_product(*device_, random, type(), m % 2 == 0 ? 17 : 79, cols, m);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Conformance, Embedding) {
  std::mt19937 random(2);
  const int32_t hidden = info(type()).block_elements > 32 ? 256 : 96;
  Pair pair(*device_, base_spec(5, hidden));
  const OwnedTensor table = random_tensor(random, type(), 11, hidden);
  const auto [want, got] = pair.load(table, WeightUse::kEmbedding);
  Flat flat(5);
  flat.tokens = {10, 0, 3, 3, 7};
  pair.begin(flat.batch());
  pair.want->embed({want, 1.5f});
  pair.got->embed({got, 1.5f});
  const std::vector<float> rows = pair.want->read_slot(Slot::kResidual);
  std::vector<double> bound;  // the file's values to the bit, where the device does not round weights
  const bool rounds = rounds_to_bf16 && hidden % 32 == 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    bound.push_back(rounds ? weight_error(type()) * std::fabs(static_cast<double>(rows[i])) +
                                 minimum_error(type()) * largest_of_block(rows.data(), at)
                           : 0.0);
  }
  expect_within(pair.got->read_slot(Slot::kResidual), rows, bound, "embedding");
}

// norm -> q, k, v with biases and head norms; bounds before the head norms, which divide by the head's rms.
TEST_P(Conformance, NormQkv) {
  std::mt19937 random(3);
  const int32_t hidden = info(type()).block_elements > 32 ? 256 : 160, m = 9;
  ExecutorSpec spec = base_spec(m, hidden);
  spec.heads = 6;
  spec.kv_heads = 2;
  spec.head_dim = 20;
  for (bool head_norms : {false, true}) {
    Pair pair(*device_, spec);
    LinearPair q(pair, random, type(), 120, hidden, true), k(pair, random, type(), 40, hidden, false),
        v(pair, random, type(), 40, hidden, true);
    const OwnedTensor norm = random_vector(random, hidden, 1.0f, 0.1f),
                      head = random_vector(random, 20, 1.0f, 0.1f);
    const auto [norm_want, norm_got] = pair.load(norm, WeightUse::kVector);
    const auto [head_want, head_got] = pair.load(head, WeightUse::kVector);
    NormQkv want{{norm_want, 1e-5f}, q.want, k.want, v.want, {}, {}},
        got{{norm_got, 1e-5f}, q.got, k.got, v.got, {}, {}};
    if (head_norms) {
      want.q_norm = want.k_norm = {head_want, 1e-6f};
      got.q_norm = got.k_norm = {head_got, 1e-6f};
    }
    Flat flat(m);
    pair.begin(flat.batch());
    const std::vector<float> x = random_floats(random, static_cast<size_t>(m * hidden), 2.0f);
    pair.write(Slot::kResidual, x);
    pair.want->norm_qkv(want);
    pair.got->norm_qkv(got);
    const auto* norm_weight = reinterpret_cast<const float*>(norm.bytes.data());
    const auto* head_weight = reinterpret_cast<const float*>(head.bytes.data());
    for (const auto& [slot, linear, rows] : {std::tuple{Slot::kQuery, &q, int64_t{120}},
                                             {Slot::kKey, &k, int64_t{40}},
                                             {Slot::kValue, &v, int64_t{40}}}) {
      std::vector<double> bound;
      for (int64_t t = 0; t < m; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < hidden; ++i)
          sum += static_cast<double>(x[t * hidden + i]) * x[t * hidden + i];
        std::vector<float> n(static_cast<size_t>(hidden));
        std::vector<double> n_error(n.size());
        for (int64_t i = 0; i < hidden; ++i) {
          n[i] = static_cast<float>(x[t * hidden + i] / std::sqrt(sum / hidden + 1e-5) * norm_weight[i]);
          n_error[i] = std::fabs(n[i]) * kEps * (hidden / 16 + 10);
        }
        std::vector<double> y(static_cast<size_t>(rows)), error(y.size());
        for (int64_t r = 0; r < rows; ++r) {
          const std::vector<float> w = linear->weight.row(r);
          y[r] = linear->bias_at(r);
          for (int64_t i = 0; i < hidden; ++i) y[r] += static_cast<double>(w[i]) * n[i];
          error[r] = product_bound(type(), w, n.data()) + carried(w, n_error) + 4 * kEps * std::fabs(y[r]);
        }
        if (head_norms && slot != Slot::kValue) {
          // y / rms(y): d(y_i / rms) <= e_i / rms + |y_i| / rms^2 * rms(e), and the head norm's own rounding.
          for (int64_t h = 0; h < rows; h += 20) {
            double yy = 0, ee = 0;
            for (int64_t i = h; i < h + 20; ++i) {
              yy += y[i] * y[i];
              ee += error[i] * error[i];
            }
            const double rms = std::sqrt(yy / 20 + 1e-6), drms = std::sqrt(ee / 20);
            for (int64_t i = h; i < h + 20; ++i) {
              error[i] =
                  1.1 * std::fabs(head_weight[i - h]) *
                  (error[i] / rms + std::fabs(y[i]) / (rms * rms) * drms + 16 * kEps * std::fabs(y[i]) / rms);
            }
          }
        }
        bound.insert(bound.end(), error.begin(), error.end());
      }
      expect_within(pair.got->read_slot(slot), pair.want->read_slot(slot), bound, "qkv");
      if (HasFatalFailure()) return;
    }
  }
}

// ---------------------------------------------------------------- feed-forward, dense and experts

// Bounds of down(act(gate n, up n)) for one token, given n's error.
struct FfnBound {
  DType type;
  const LinearPair &gate, &up, &down;
  bool clamped;

  std::vector<double> operator()(const std::vector<float>& n, const std::vector<double>& n_error,
                                 int64_t expert, int64_t inner, int64_t hidden) const {
    std::vector<float> h(static_cast<size_t>(inner));
    std::vector<double> h_error(h.size());
    for (int64_t i = 0; i < inner; ++i) {
      const int64_t r = expert * inner + i;
      const std::vector<float> wg = gate.weight.row(r), wu = up.weight.row(r);
      double g = gate.bias_at(r), u = up.bias_at(r);
      for (size_t c = 0; c < wg.size(); ++c) {
        g += static_cast<double>(wg[c]) * n[c];
        u += static_cast<double>(wu[c]) * n[c];
      }
      const double eg = product_bound(type, wg, n.data()) + carried(wg, n_error) + 4 * kEps * std::fabs(g);
      const double eu = product_bound(type, wu, n.data()) + carried(wu, n_error) + 4 * kEps * std::fabs(u);
      const double alpha = clamped ? 1.702 : 1.0;
      if (clamped) {
        g = std::min(g, 7.0);
        u = std::clamp(u, -7.0, 7.0) + 1;
      }
      const double silu = g / (1 + std::exp(-alpha * g));
      h[i] = static_cast<float>(silu * u);
      // |d silu / dg| <= 1.1; the two errors also multiply.
      h_error[i] =
          1.1 * eg * std::fabs(u) + std::fabs(silu) * eu + 1.1 * eg * eu + 32 * kEps * std::fabs(h[i]);
    }
    std::vector<double> bound;
    for (int64_t r = 0; r < hidden; ++r) {
      const std::vector<float> w = down.weight.row(expert * hidden + r);
      double y = down.bias_at(expert * hidden + r);
      for (int64_t i = 0; i < inner; ++i) y += static_cast<double>(w[i]) * h[i];
      // Quantizing h sees h with its error: a step is larger by the error's share.
      std::vector<float> worst(h);
      for (int64_t i = 0; i < inner; ++i) worst[i] = static_cast<float>(std::fabs(h[i]) + h_error[i]);
      bound.push_back(product_bound(type, w, worst.data()) + carried(w, h_error) + 4 * kEps * std::fabs(y));
    }
    return bound;
  }
};

// norm(x) with weight 1, exact to the last float.
std::vector<float> normed(const float* x, int64_t size, float eps) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(x[i]) * x[i];
  std::vector<float> n(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i)
    n[i] = static_cast<float>(x[i] / std::sqrt(sum / static_cast<double>(size) + eps));
  return n;
}
std::vector<double> norm_error(const std::vector<float>& n) {
  std::vector<double> e;
  for (float v : n) e.push_back(std::fabs(v) * kEps * static_cast<double>(n.size() / 16 + 10));
  return e;
}

TEST_P(Conformance, DenseFeedForward) {
  std::mt19937 random(4);
  const int64_t unit = info(type()).block_elements > 32 ? 256 : 32;
  const auto hidden = static_cast<int32_t>(unit * (unit == 32 ? 3 : 1)),
             inner = static_cast<int32_t>(unit * (unit == 32 ? 5 : 1));
  for (int32_t m : {1, 6}) {
    ExecutorSpec spec = base_spec(m, hidden);
    spec.ffn = inner;
    Pair pair(*device_, spec);
    const LinearPair gate(pair, random, type(), inner, hidden, false),
        up(pair, random, type(), inner, hidden, false), down(pair, random, type(), hidden, inner, true);
    const OwnedTensor ones = random_vector(random, hidden, 1.0f, 0.0f);
    const auto [norm_want, norm_got] = pair.load(ones, WeightUse::kVector);
    Flat flat(m);
    pair.begin(flat.batch());
    const std::vector<float> x = random_floats(random, static_cast<size_t>(m * hidden), 3.0f);
    pair.write(Slot::kResidual, x);
    pair.want->ffn_add({{norm_want, 1e-5f}, gate.want, up.want, down.want});
    pair.got->ffn_add({{norm_got, 1e-5f}, gate.got, up.got, down.got});
    const std::vector<float> want = pair.want->read_slot(Slot::kResidual);
    std::vector<double> bound;
    const FfnBound ffn{type(), gate, up, down, false};
    for (int64_t t = 0; t < m; ++t) {
      const std::vector<float> n = normed(&x[t * hidden], hidden, 1e-5f);
      for (double b : ffn(n, norm_error(n), 0, inner, hidden)) bound.push_back(b);
    }
    for (size_t i = 0; i < bound.size(); ++i) bound[i] += 4 * kEps * (std::fabs(x[i]) + std::fabs(want[i]));
    expect_within(pair.got->read_slot(Slot::kResidual), want, bound, "ffn");
    if (HasFatalFailure()) return;
  }
}

TEST_P(Conformance, Experts) {
  std::mt19937 random(5);
  const int64_t unit = info(type()).block_elements > 32 ? 256 : 32;
  const auto hidden = static_cast<int32_t>(unit * (unit == 32 ? 3 : 1)),
             inner = static_cast<int32_t>(unit * (unit == 32 ? 5 : 1));
  constexpr int32_t kExperts = 5, kChosen = 3, kTokens = 11;
  for (bool gpt_oss : {false, true}) {
    for (auto weighting : {Route::Weighting::kSoftmaxChosen, Route::Weighting::kSoftmaxAll,
                           Route::Weighting::kSoftmaxAllRenormalized}) {
      ExecutorSpec spec = base_spec(kTokens, hidden);
      spec.experts = kExperts;
      spec.experts_per_token = kChosen;
      spec.expert_ffn = inner;
      Pair pair(*device_, spec);
      const LinearPair gate(pair, random, type(), inner, hidden, gpt_oss, kExperts),
          up(pair, random, type(), inner, hidden, gpt_oss, kExperts),
          down(pair, random, type(), hidden, inner, gpt_oss, kExperts),
          router(pair, random, gpt_oss ? DType::kBF16 : DType::kF32, kExperts, hidden, gpt_oss);
      const OwnedTensor ones = random_vector(random, hidden, 1.0f, 0.0f);
      const auto [norm_want, norm_got] = pair.load(ones, WeightUse::kVector);
      Flat flat(kTokens);
      pair.begin(flat.batch());
      const std::vector<float> x = random_floats(random, static_cast<size_t>(kTokens * hidden), 3.0f);
      pair.write(Slot::kResidual, x);
      pair.want->route({{norm_want, 1e-5f}, router.want, kChosen, weighting});
      pair.got->route({{norm_got, 1e-5f}, router.got, kChosen, weighting});
      const auto activation = gpt_oss ? Activation::kClampedSwiglu : Activation::kSilu;
      pair.want->experts_add({gate.want, up.want, down.want, activation});
      pair.got->experts_add({gate.got, up.got, down.got, activation});
      const std::vector<float> want = pair.want->read_slot(Slot::kResidual);
      std::vector<double> bound;
      const FfnBound ffn{type(), gate, up, down, gpt_oss};
      for (int64_t t = 0; t < kTokens; ++t) {
        // Weights add up to at most 1, so the worst expert's bound holds for the sum. A weight itself is off
        // by a few rounding errors of the router's sum.
        const std::vector<float> n = normed(&x[t * hidden], hidden, 1e-5f);
        std::vector<double> worst(static_cast<size_t>(hidden), 0.0);
        for (int64_t e = 0; e < kExperts; ++e) {
          const std::vector<double> b = ffn(n, norm_error(n), e, inner, hidden);
          for (int64_t i = 0; i < hidden; ++i) worst[i] = std::max(worst[i], b[i]);
        }
        for (int64_t i = 0; i < hidden; ++i) {
          const double moved = std::fabs(static_cast<double>(want[t * hidden + i]) - x[t * hidden + i]);
          double down_size =
              0;  // sum of |w||h| is below 40 sigma here; a router error of 1e-5 moves that share
          for (int64_t e = 0; e < kExperts; ++e) {
            double row = 0;
            for (float w : down.weight.row(e * hidden + i)) row += std::fabs(static_cast<double>(w));
            down_size = std::max(down_size, row);
          }
          bound.push_back(worst[i] + 1e-5 * (moved + down_size) + 4 * kEps * std::fabs(x[t * hidden + i]));
        }
      }
      expect_within(pair.got->read_slot(Slot::kResidual), want, bound, "experts");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Conformance, LogitsOfChosenRows) {
  std::mt19937 random(6);
  const int32_t hidden = info(type()).block_elements > 32 ? 256 : 96, vocab = 77;
  ExecutorSpec spec = base_spec(6, hidden);
  spec.vocab = vocab;
  Pair pair(*device_, spec);
  const LinearPair output(pair, random, type(), vocab, hidden, false);
  const OwnedTensor ones = random_vector(random, hidden, 1.0f, 0.0f);
  const auto [norm_want, norm_got] = pair.load(ones, WeightUse::kVector);
  Flat flat(6);
  flat.logit_rows = {1, 2, 5};
  pair.begin(flat.batch());
  const std::vector<float> x = random_floats(random, static_cast<size_t>(6 * hidden));
  pair.write(Slot::kResidual, x);
  pair.want->norm_logits({{norm_want, 1e-5f}, output.want});
  pair.got->norm_logits({{norm_got, 1e-5f}, output.got});
  std::vector<double> bound;
  for (int32_t row : flat.logit_rows) {
    const std::vector<float> n = normed(&x[row * hidden], hidden, 1e-5f);
    for (int64_t r = 0; r < vocab; ++r) {
      const std::vector<float> w = output.weight.row(r);
      bound.push_back(product_bound(type(), w, n.data()) + carried(w, norm_error(n)) + 1e-30);
    }
  }
  expect_within(pair.got->read_slot(Slot::kLogits), pair.want->read_slot(Slot::kLogits), bound, "logits");
  EXPECT_EQ(pair.got->logits().size(), static_cast<size_t>(3 * vocab));
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<int, DType>>& i) {
  return device_labels()[static_cast<size_t>(std::get<0>(i.param))] + "_" +
         std::string(info(std::get<1>(i.param)).name);
}
INSTANTIATE_TEST_SUITE_P(Types, Conformance,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(device_labels().size())),
                                            ::testing::ValuesIn(matrix_types())),
                         name_of);
// The types that came later: those with kernels on every instruction set, the others, which all become
// float32 on the cpu, on the best; both on every further device.
INSTANTIATE_TEST_SUITE_P(CpuKernels, Conformance,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(device_labels().size())),
                                            ::testing::ValuesIn(cpu_kernel_types())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(CpuDequantized, Conformance,
                         ::testing::Combine(::testing::Range(static_cast<int>(cpu::runnable_tables().size()) -
                                                                 1,
                                                             static_cast<int>(device_labels().size())),
                                            ::testing::ValuesIn(cpu_dequantized_types())),
                         name_of);

TEST(ConformanceTypes, AreAllThatWeightsHave) {
  for (int i = 0; i <= static_cast<int>(DType::kU8); ++i) {
    const auto type = static_cast<DType>(i);
    const bool is_weight = type != DType::kI32 && type != DType::kU8;
    const auto in = [&](const std::vector<DType>& types) {
      return std::count(types.begin(), types.end(), type);
    };
    EXPECT_EQ(in(matrix_types()) + in(cpu_kernel_types()) + in(cpu_dequantized_types()), is_weight ? 1 : 0)
        << info(type).name;
  }
}

// ---------------------------------------------------------------- attention

struct AttentionCase {
  int32_t heads, kv_heads, head_dim, window;
  bool sinks, interleaved;
  DType kv_type;
  int32_t chunk = 0;  // then queries grow too
};

// A ragged batch: a fresh prompt, a long context that goes on, a single new token. Contexts are built up by
// earlier steps, whose attention is compared as well.
void compare_attention(Backend& device, const AttentionCase& c, const std::string& label) {
  std::mt19937 random(7);
  ExecutorSpec spec = base_spec(96, 32);
  spec.heads = c.heads;
  spec.kv_heads = c.kv_heads;
  spec.head_dim = c.head_dim;
  spec.max_context = 1300;
  spec.kv_type = c.kv_type;
  const int32_t kept = std::max(c.window, c.chunk);
  spec.kv_groups = {{0, 1, 200}, {kept, 2, 210}};
  spec.layers = {{0, 0}, {1, 0}, {1, 1}};
  const int layer = kept > 0 ? 2 : 0;
  Pair pair(device, spec);
  const OwnedTensor sink = random_vector(random, c.heads, 1.0f, 1.0f);
  const auto [sink_want, sink_got] = pair.load(sink, WeightUse::kVector);
  const int32_t rotary = c.head_dim / 4 * 2;
  std::vector<float> inv_freq;
  for (int i = 0; i < rotary / 2; ++i)
    inv_freq.push_back(static_cast<float>(std::pow(1e4, -2.0 * i / rotary)));

  TestSequence sequences[3];
  std::array<int32_t, kMaxKvGroups> next{};
  const std::vector<std::array<int32_t, 3>> steps = {{0, 96, 0},  {0, 90, 5}, {0, 96, 0},
                                                     {0, 96, 0},  {0, 96, 0}, {0, 96, 0},
                                                     {17, 33, 1}, {1, 1, 1},  {0, 1, 0}};
  for (const auto& step : steps) {
    std::vector<SequenceSlice> slices;
    int32_t rows = 0;
    for (int s = 0; s < 3; ++s) {
      if (step[s] == 0) continue;
      sequences[s].reserve(spec, step[s], next);
      slices.push_back(sequences[s].slice(rows, step[s]));
      rows += step[s];
    }
    const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
    pair.begin({tokens, slices, {}});
    const std::vector<float> q = random_floats(random, static_cast<size_t>(rows * c.heads * c.head_dim)),
                             k = random_floats(random, static_cast<size_t>(rows * c.kv_heads * c.head_dim)),
                             v = random_floats(random, k.size());
    pair.write(Slot::kQuery, q);
    pair.write(Slot::kKey, k);
    pair.write(Slot::kValue, v);
    Rope rope{layer, inv_freq, 1.25f, c.interleaved};
    if (c.chunk > 0) rope.growth = {0.2f, 32.0f, 1};
    pair.want->rope_append_kv(rope);
    pair.got->rope_append_kv(rope);
    const std::vector<float> q_want = pair.want->read_slot(Slot::kQuery);
    std::vector<double> rotated;
    for (size_t i = 0; i < q_want.size(); ++i) rotated.push_back(8 * kEps * 2 * 5);  // |a cos| + |b sin| < 10
    expect_within(pair.got->read_slot(Slot::kQuery), q_want, rotated, label + " rope");
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    pair.want->attend({layer, c.window, scale, c.sinks ? sink_want : nullptr, 0.0f, c.chunk});
    pair.got->attend({layer, c.window, scale, c.sinks ? sink_got : nullptr, 0.0f, c.chunk});
    // Scores are off by the rounding of their sum and of the cached keys; with e the largest such error the
    // weights are off by a factor exp(2 e) and the output by that share of the largest value, and by the
    // values' rounding.
    // One byte: both sides round alike, but for a value so near a tie that the rotation's own rounding turns
    // it: a step of one among all dimensions.
    const double kv_eps = c.kv_type == DType::kF32 ? 0 : c.kv_type == DType::kF16 ? 0x1p-11 : 0x1p-8;
    const double largest = 6.0 * 1.8;  // of |q|, |k| after rotation by a magnitude of 1.25
    const double norm = largest * largest * c.head_dim / 4;  // sum |q||k| of normal numbers, generously
    const double score_error = scale * norm * (kv_eps / 2 + kEps * (c.head_dim + 16));
    const double bound = 6.0 * (std::expm1(2 * score_error) + kv_eps + kEps * 200);
    const std::vector<float> got = pair.got->read_slot(Slot::kAttention),
                             want = pair.want->read_slot(Slot::kAttention);
    expect_within(got, want, std::vector<double>(q.size(), bound), label);
    if (::testing::Test::HasFatalFailure()) return;
    // That bound is of the worst case, and wide where the cache rounds: on average results are much nearer.
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += std::pow(static_cast<double>(got[i]) - want[i], 2);
      size += std::pow(static_cast<double>(want[i]), 2);
    }
    EXPECT_LT(std::sqrt(error / size), c.kv_type == DType::kF32 ? 1e-5 : 0.02) << label;
    for (int s = 0; s < 3; ++s) sequences[s].length += step[s];
  }
}

TEST(Attention, MatchesReference) {
  const AttentionCase cases[] = {
      {8, 2, 64, 0, true, false, DType::kF32},       {8, 2, 64, 128, true, false, DType::kBF16},
      {3, 1, 20, 0, false, true, DType::kF32},       {3, 3, 8, 0, false, false, DType::kF16},
      {3, 3, 8, 20, false, true, DType::kF32},       {9, 3, 64, 0, false, true, DType::kBF16},
      {40, 1, 16, 1, true, false, DType::kF32},      {2, 2, 33, 700, true, false, DType::kF32},
      {5, 1, 128, 0, false, false, DType::kF32},     {8, 1, 64, 0, true, false, DType::kBF16},
      {16, 2, 20, 50, true, false, DType::kF32},     {8, 2, 64, 128, true, false, DType::kQ8_0},
      {8, 1, 32, 0, false, false, DType::kQ8_0},     {9, 3, 40, 0, true, true, DType::kF8E4M3},
      {8, 2, 64, 0, true, false, DType::kF8E4M3},    {8, 1, 64, 128, true, true, DType::kF8E4M3},
      {4, 2, 128, 50, false, false, DType::kF8E4M3}, {16, 1, 64, 0, false, false, DType::kF8E4M3},
      {6, 2, 16, 0, false, true, DType::kF32, 40},   {4, 1, 32, 0, true, false, DType::kBF16, 100},
  };
  for (Device& device : all_devices()) {
    for (const AttentionCase& c : cases) {
      if (!device.backend->supports_kv_type(c.kv_type)) continue;
      compare_attention(*device.backend, c,
                        device.label + " heads " + std::to_string(c.heads) + "/" +
                            std::to_string(c.kv_heads) + " dim " + std::to_string(c.head_dim) + " window " +
                            std::to_string(c.window));
      if (HasFatalFailure()) return;
    }
  }
}

// ---------------------------------------------------------------- mixtures

// Sigmoid routing by groups with a bias of the choice, a scale, a shared expert with and without a mix,
// inputs that are weighed: float32, so that both sides choose the same experts and differ by the rounding of
// sums.
TEST(Mixture, MatchesReference) {
  constexpr int32_t kHidden = 48, kInner = 40, kShared = 56, kExperts = 6, kChosen = 3;
  for (Device& device : all_devices()) {
    for (const int32_t tokens : {1, 5, 37}) {
      for (int variant = 0; variant < 8; ++variant) {
        const bool grouped = variant % 2 == 1, mixed = variant / 2 % 2 == 1, weighed = variant / 4 == 1;
        std::mt19937 random(static_cast<unsigned>(100 + variant));
        ExecutorSpec spec = base_spec(tokens, kHidden);
        spec.experts = kExperts;
        spec.experts_per_token = kChosen;
        spec.expert_ffn = kInner;
        spec.ffn = kShared;
        Pair pair(*device.backend, spec);
        const LinearPair gate(pair, random, DType::kF32, kInner, kHidden, false, kExperts),
            up(pair, random, DType::kF32, kInner, kHidden, false, kExperts),
            down(pair, random, DType::kF32, kHidden, kInner, false, kExperts),
            router(pair, random, DType::kF32, kExperts, kHidden, false),
            shared_gate(pair, random, DType::kF32, kShared, kHidden, false),
            shared_up(pair, random, DType::kF32, kShared, kHidden, false),
            shared_down(pair, random, DType::kF32, kHidden, kShared, false),
            mix(pair, random, DType::kF32, 1, kHidden, false);
        const OwnedTensor ones = random_vector(random, kHidden, 1.0f, 0.1f),
                          bias = random_vector(random, kExperts, 0.0f, 0.5f);
        const auto [norm_want, norm_got] = pair.load(ones, WeightUse::kVector);
        const auto [bias_want, bias_got] = pair.load(bias, WeightUse::kVector);
        Flat flat(tokens);
        pair.begin(flat.batch());
        pair.write(Slot::kResidual, random_floats(random, static_cast<size_t>(tokens * kHidden), 3.0f));
        const auto weighting = mixed ? Route::Weighting::kSigmoidRenormalized : Route::Weighting::kSigmoid;
        const auto route = [&](const Weight* norm, const Linear& linear, const Weight* choice) {
          return Route{.norm = {norm, 1e-5f},
                       .router = linear,
                       .experts_per_token = kChosen,
                       .weighting = weighting,
                       .scale = 1.7f,
                       .choice_bias = grouped ? choice : nullptr,
                       .groups = grouped ? 3 : 1,
                       .groups_chosen = grouped ? 2 : 1};
        };
        pair.want->route(route(norm_want, router.want, bias_want));
        pair.got->route(route(norm_got, router.got, bias_got));
        Experts want{gate.want, up.want, down.want}, got{gate.got, up.got, down.got};
        want.weigh_input = got.weigh_input = weighed;
        want.shared = {shared_gate.want, shared_up.want, shared_down.want, mixed ? mix.want : Linear{}};
        got.shared = {shared_gate.got, shared_up.got, shared_down.got, mixed ? mix.got : Linear{}};
        pair.want->experts_add(want);
        pair.got->experts_add(got);
        // Sums of some ten values of up to about ten each, twice over.
        const std::vector<float> expected = pair.want->read_slot(Slot::kResidual);
        std::vector<double> bound;
        for (const float x : expected) bound.push_back(1e-4 + 1e-5 * std::fabs(static_cast<double>(x)));
        expect_within(pair.got->read_slot(Slot::kResidual), expected, bound,
                      device.label + " variant " + std::to_string(variant));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// ---------------------------------------------------------------- damaged numbers

TEST(Damaged, NanWeightsDoNotCrash) {
  std::mt19937 random(8);
  for (Device& device : all_devices()) {
    ExecutorSpec spec = base_spec(4, 64);
    spec.experts = 6;
    spec.experts_per_token = 4;
    spec.expert_ffn = 32;
    Pair pair(*device.backend, spec);
    LinearPair router(pair, random, DType::kF32, 6, 64, false),
        gate(pair, random, DType::kQ4_0, 32, 64, false, 6), up(pair, random, DType::kQ4_0, 32, 64, false, 6),
        down(pair, random, DType::kMXFP4, 64, 32, false, 6);
    auto* w = reinterpret_cast<float*>(router.weight.bytes.data());
    std::fill_n(w, 6 * 64, std::numeric_limits<float>::quiet_NaN());
    for (std::byte& b : gate.weight.bytes) b = std::byte{0xff};
    for (std::byte& b : down.weight.bytes) b = std::byte{0xff};
    const OwnedTensor ones = random_vector(random, 64, 1.0f, 0.0f);
    const auto [norm_want, norm_got] = pair.load(ones, WeightUse::kVector);
    Flat flat(4);
    pair.begin(flat.batch());
    std::vector<float> x = random_floats(random, 4 * 64);
    x[5] = std::numeric_limits<float>::infinity();
    x[70] = std::numeric_limits<float>::quiet_NaN();
    pair.got->write_slot(Slot::kResidual, x);
    pair.got->route({{norm_got, 1e-5f}, router.got, 4});
    pair.got->experts_add({gate.got, up.got, down.got});
    EXPECT_EQ(pair.got->read_slot(Slot::kResidual).size(), x.size());
  }
}

TEST(Backend, NamesWhatItCannotLoad) {
  std::mt19937 random(9);
  for (Device& device : cpu_devices(1)) {
    OwnedTensor t = random_tensor(random, DType::kF32, 2, 8);
    EXPECT_EQ(device.backend->weight_bytes(t.view, WeightUse::kMatrix, size_t{1} << 60),
              0u);  // no memory left
    EXPECT_EQ(device.backend->weight_bytes(t.view, WeightUse::kVector, 0), 64u);
    t.view.type = DType::kI32;
    t.view.name = "strange.weight";
    try {
      device.backend->load_weight(t.view, WeightUse::kMatrix);
      FAIL();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("strange.weight"), std::string::npos) << e.what();
    }
    ExecutorSpec spec = base_spec(4, 64);
    spec.kv_type = DType::kQ4_0;
    EXPECT_THROW(device.backend->make_executor(spec), Error);
    spec.kv_type = DType::kQ8_0;  // a scale per 32 dimensions
    spec.head_dim = 48;
    EXPECT_THROW(device.backend->make_executor(spec), Error);
  }
}

// What the memory plan counts is what is held, and what is only looked up is not copied to be multiplied.
TEST(Backend, CopiesWhatItSaysItWill) {
  std::mt19937 random(10);
  const OwnedTensor t = random_tensor(random, DType::kQ4_K, 8, 512);
  for (Device& device : cpu_devices(1)) {
    const auto bytes = [&](WeightUse use, size_t before) {
      return device.backend->weight_bytes(t.view, use, before);
    };
    EXPECT_EQ(bytes(WeightUse::kLookup, 0), 0u) << device.label;
    EXPECT_EQ(bytes(WeightUse::kEmbedding, 0), bytes(WeightUse::kMatrix, 0)) << device.label;
    // Weights before it may have taken all the room there is.
    EXPECT_EQ(bytes(WeightUse::kMatrix, std::numeric_limits<size_t>::max()), 0u) << device.label;
    EXPECT_EQ(device.backend->load_weight(t.view, WeightUse::kMatrix)->copied,
              bytes(WeightUse::kMatrix, 0) > 0)
        << device.label;
    EXPECT_FALSE(device.backend->load_weight(t.view, WeightUse::kLookup)->copied) << device.label;
    EXPECT_FALSE(device.backend->load_weight(t.view, WeightUse::kEmbedding)->copied) << device.label;
  }
}

TEST(Backend, UnknownInstructionSetNamesTheChoices) {
  try {
    make_cpu_backend({1}, "mmx");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("scalar"), std::string::npos) << e.what();
  }
  EXPECT_THROW(make_cpu_backend({-1}), Error);
}

}  // namespace
}  // namespace millrace
