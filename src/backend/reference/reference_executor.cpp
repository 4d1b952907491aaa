// Every operation of backend.h in the shortest form that is obviously right.
#include "backend/reference/reference_executor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "kernels/quant/codec.h"
#include "kernels/quant/kv_types.h"

namespace millrace {
namespace {

using Floats = std::vector<float>;

const ReferenceWeight& own(const Weight& weight) { return static_cast<const ReferenceWeight&>(weight); }

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// y[rows_of_x, out] = x W^T + b, for expert `expert` of W.
void linear(const Linear& op, int64_t expert, const float* x, int64_t count, float* y) {
  const ReferenceWeight& w = own(*op.weight);
  Floats row(static_cast<size_t>(w.cols));
  for (int64_t r = 0; r < w.rows; ++r) {
    quant::dequantize_row(w.view, expert * w.rows + r, row.data());
    const double bias = op.bias != nullptr ? own(*op.bias).values[expert * w.rows + r] : 0.0;
    for (int64_t t = 0; t < count; ++t) {
      double sum = 0;
      for (int64_t c = 0; c < w.cols; ++c) sum += static_cast<double>(row[c]) * x[t * w.cols + c];
      y[t * w.rows + r] = static_cast<float>(sum + bias);
    }
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight over `size` values.
void rms_norm(const Norm& op, const float* x, int64_t size, float* y) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(size) + op.eps);
  for (int64_t i = 0; i < size; ++i) y[i] = static_cast<float>(x[i] * scale * own(*op.weight).values[i]);
}

class ReferenceExecutor final : public Executor {
 public:
  explicit ReferenceExecutor(const ExecutorSpec& spec) : spec_(spec), kv_type_(spec.kv_type) {
    spec_.kv_type = DType::kF32;  // rounded to kv_type_, kept as float32
    const size_t rows = spec.max_tokens;
    residual_.resize(rows * spec.hidden);
    normed_.resize(rows * spec.hidden);
    query_.resize(rows * spec.heads * spec.head_dim);
    key_.resize(rows * spec.kv_heads * spec.head_dim);
    value_.resize(key_.size());
    attention_.resize(query_.size());
    chosen_.resize(rows * spec.experts_per_token);
    chosen_weight_.resize(chosen_.size());
    logits_.resize(static_cast<size_t>(spec.max_logit_rows) * spec.vocab);
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      pools_.emplace_back(spec_.kv_block_bytes(static_cast<int>(g)) / sizeof(float) *
                          spec.kv_groups[g].num_blocks);
    }
  }

  void begin(const Batch& batch) override {
    MILLRACE_CHECK(batch.tokens.size() <= static_cast<size_t>(spec_.max_tokens));
    MILLRACE_CHECK(batch.logit_rows.size() <= static_cast<size_t>(spec_.max_logit_rows));
    batch_ = batch;
    rows_ = static_cast<int64_t>(batch.tokens.size());
  }

  void embed(const Weight& table, float scale) override {
    for (int64_t t = 0; t < rows_; ++t) {
      float* x = residual_.data() + t * spec_.hidden;
      quant::dequantize_row(own(table).view, batch_.tokens[t], x);
      for (int64_t i = 0; i < spec_.hidden; ++i) x[i] *= scale;
    }
  }

  void norm_qkv(const NormQkv& op) override {
    norm_rows(op.norm);
    linear(op.q, 0, normed_.data(), rows_, query_.data());
    linear(op.k, 0, normed_.data(), rows_, key_.data());
    linear(op.v, 0, normed_.data(), rows_, value_.data());
    if (op.q_norm.weight != nullptr) norm_heads(op.q_norm, spec_.heads, query_);
    if (op.k_norm.weight != nullptr) norm_heads(op.k_norm, spec_.kv_heads, key_);
  }

  void rope_append_kv(const Rope& op) override {
    const int64_t dim = spec_.head_dim;
    for (const SequenceSlice& s : batch_.sequences) {
      for (int32_t i = 0; i < s.num_tokens; ++i) {
        const int64_t row = s.first_row + i;
        const int32_t position = s.context_len + i;
        for (int h = 0; h < spec_.heads; ++h) rotate(op, position, &query_[(row * spec_.heads + h) * dim]);
        for (int h = 0; h < spec_.kv_heads; ++h) {
          float* k = &key_[(row * spec_.kv_heads + h) * dim];
          rotate(op, position, k);
          float *to_key = cached(s, op.layer, 0, h, position),
                *to_value = cached(s, op.layer, 1, h, position);
          std::copy_n(k, dim, to_key);
          std::copy_n(&value_[(row * spec_.kv_heads + h) * dim], dim, to_value);
          round_to_kv_type(kv_type_, to_key, dim);
          round_to_kv_type(kv_type_, to_value, dim);
        }
      }
    }
  }

  void attend(const Attend& op) override {
    for (const SequenceSlice& s : batch_.sequences) {
      for (int32_t i = 0; i < s.num_tokens; ++i) {
        for (int h = 0; h < spec_.heads; ++h) attend_one(op, s, i, h);
      }
    }
  }

  void project_add(const Linear& op) override { linear_add(op, attention_.data()); }

  void ffn_add(const Ffn& op) override {
    norm_rows(op.norm);
    Floats gate(rows_ * spec_.ffn), up(gate.size());
    linear(op.gate, 0, normed_.data(), rows_, gate.data());
    linear(op.up, 0, normed_.data(), rows_, up.data());
    for (size_t i = 0; i < gate.size(); ++i) {
      gate[i] = static_cast<float>(gate[i] * sigmoid(gate[i]) * up[i]);
    }
    linear_add(op.down, gate.data());
  }

  void route(const Route& op) override {
    norm_rows(op.norm);
    const int64_t experts = spec_.experts, k = op.experts_per_token;
    Floats scores(rows_ * experts);
    linear(op.router, 0, normed_.data(), rows_, scores.data());
    for (int64_t t = 0; t < rows_; ++t)
      choose(op, &scores[t * experts], &chosen_[t * k], &chosen_weight_[t * k]);
  }

  void experts_add(const Experts& op) override {
    const int64_t k = spec_.experts_per_token;
    Floats gate(spec_.expert_ffn), up(spec_.expert_ffn), down(spec_.hidden);
    for (int64_t t = 0; t < rows_; ++t) {
      const float* x = &normed_[t * spec_.hidden];
      std::vector<double> sum(spec_.hidden, 0.0);
      for (int64_t slot = 0; slot < k; ++slot) {
        const int32_t expert = chosen_[t * k + slot];
        linear(op.gate, expert, x, 1, gate.data());
        linear(op.up, expert, x, 1, up.data());
        for (int64_t i = 0; i < spec_.expert_ffn; ++i) gate[i] = activate(op, gate[i], up[i]);
        linear(op.down, expert, gate.data(), 1, down.data());
        for (int64_t i = 0; i < spec_.hidden; ++i) {
          sum[i] += static_cast<double>(down[i]) * chosen_weight_[t * k + slot];
        }
      }
      for (int64_t i = 0; i < spec_.hidden; ++i) {
        float& x_out = residual_[t * spec_.hidden + i];
        x_out = static_cast<float>(x_out + sum[i]);
      }
    }
  }

  void norm_logits(const Logits& op) override {
    Floats normed(spec_.hidden);
    for (size_t i = 0; i < batch_.logit_rows.size(); ++i) {
      rms_norm(op.norm, &residual_[static_cast<int64_t>(batch_.logit_rows[i]) * spec_.hidden], spec_.hidden,
               normed.data());
      linear(op.output, 0, normed.data(), 1, &logits_[i * spec_.vocab]);
    }
  }

  std::span<const float> logits() override {
    return {logits_.data(), batch_.logit_rows.size() * spec_.vocab};
  }

  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override {
    MILLRACE_CHECK(row >= 0 && row < rows_ && std::ssize(to) == spec_.hidden);
    rms_norm(norm, &residual_[static_cast<int64_t>(row) * spec_.hidden], spec_.hidden, to.data());
  }

  void read_block(int group, int32_t block, std::span<std::byte> to) override {
    const std::span<std::byte> from = block_bytes(group, block);
    MILLRACE_CHECK(to.size() == from.size());
    std::copy(from.begin(), from.end(), to.begin());
  }

  void write_block(int group, int32_t block, std::span<const std::byte> from) override {
    const std::span<std::byte> to = block_bytes(group, block);
    MILLRACE_CHECK(to.size() == from.size());
    std::copy(from.begin(), from.end(), to.begin());
  }

  void copy_block(int group, int32_t from, int32_t to) override {
    const std::span<std::byte> source = block_bytes(group, from);
    std::copy(source.begin(), source.end(), block_bytes(group, to).begin());
  }

  std::vector<float> read_slot(Slot slot) override {
    const auto [values, columns] = slot_of(slot);
    const int64_t rows = slot == Slot::kLogits ? static_cast<int64_t>(batch_.logit_rows.size()) : rows_;
    return Floats(values->begin(), values->begin() + rows * columns);
  }

  void write_slot(Slot slot, std::span<const float> in) override {
    Floats& values = *slot_of(slot).first;
    MILLRACE_CHECK(in.size() <= values.size());
    std::copy(in.begin(), in.end(), values.begin());
  }

 private:
  std::pair<Floats*, int64_t> slot_of(Slot slot) {
    switch (slot) {
      case Slot::kResidual:
        return {&residual_, spec_.hidden};
      case Slot::kQuery:
        return {&query_, spec_.heads * spec_.head_dim};
      case Slot::kKey:
        return {&key_, spec_.kv_heads * spec_.head_dim};
      case Slot::kValue:
        return {&value_, spec_.kv_heads * spec_.head_dim};
      case Slot::kAttention:
        return {&attention_, spec_.heads * spec_.head_dim};
      case Slot::kLogits:
        break;
    }
    return {&logits_, spec_.vocab};
  }

  void norm_rows(const Norm& op) {
    for (int64_t t = 0; t < rows_; ++t) {
      rms_norm(op, &residual_[t * spec_.hidden], spec_.hidden, &normed_[t * spec_.hidden]);
    }
  }

  void norm_heads(const Norm& op, int heads, Floats& values) {
    for (int64_t i = 0; i < rows_ * heads; ++i) {
      rms_norm(op, &values[i * spec_.head_dim], spec_.head_dim, &values[i * spec_.head_dim]);
    }
  }

  void linear_add(const Linear& op, const float* x) {
    Floats y(rows_ * spec_.hidden);
    linear(op, 0, x, rows_, y.data());
    for (size_t i = 0; i < y.size(); ++i) residual_[i] += y[i];
  }

  static void rotate(const Rope& op, int32_t position, float* x) {
    const int64_t half = static_cast<int64_t>(op.inv_freq.size());
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * op.inv_freq[i];
      const double c = std::cos(angle) * op.magnitude, s = std::sin(angle) * op.magnitude;
      float& a = op.interleaved ? x[2 * i] : x[i];
      float& b = op.interleaved ? x[2 * i + 1] : x[i + half];
      const double a0 = a, b0 = b;
      a = static_cast<float>(a0 * c - b0 * s);
      b = static_cast<float>(b0 * c + a0 * s);
    }
  }

  std::span<std::byte> block_bytes(int group, int32_t block) {
    const size_t bytes = spec_.kv_block_bytes(group);
    MILLRACE_CHECK(block >= 0 && block < spec_.kv_groups[group].num_blocks);
    return std::as_writable_bytes(std::span(pools_[group]))
        .subspan(static_cast<size_t>(block) * bytes, bytes);
  }

  // The cached key (part 0) or value (part 1) of one head at one position: [head_dim].
  float* cached(const SequenceSlice& s, int layer, int part, int head, int32_t position) {
    const auto [group, index] = spec_.layers[layer];
    const int32_t block = s.tables[group][position / kBlockTokens];
    MILLRACE_CHECK(block != kNoBlock);
    const int64_t block_floats = static_cast<int64_t>(spec_.kv_block_bytes(group) / sizeof(float));
    const int64_t in_block =
        (((static_cast<int64_t>(index) * 2 + part) * spec_.kv_heads + head) * kBlockTokens +
         position % kBlockTokens) *
        spec_.head_dim;
    return pools_[group].data() + block * block_floats + in_block;
  }

  void attend_one(const Attend& op, const SequenceSlice& s, int32_t i, int head) {
    const int64_t dim = spec_.head_dim;
    const int kv_head = head / (spec_.heads / spec_.kv_heads);
    const int32_t position = s.context_len + i;
    const int32_t first = op.window > 0 ? std::max(0, position - op.window + 1) : 0;
    const float* q = &query_[((s.first_row + i) * static_cast<int64_t>(spec_.heads) + head) * dim];

    std::vector<double> weight(position - first + 1);
    double top = -std::numeric_limits<double>::infinity();
    if (op.sinks != nullptr) top = own(*op.sinks).values[head];
    for (int32_t p = first; p <= position; ++p) {
      const float* k = cached(s, op.layer, 0, kv_head, p);
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * k[d];
      weight[p - first] = dot * op.scale;
      top = std::max(top, weight[p - first]);
    }
    double denominator = op.sinks != nullptr ? std::exp(own(*op.sinks).values[head] - top) : 0.0;
    for (double& w : weight) denominator += w = std::exp(w - top);

    std::vector<double> out(dim, 0.0);
    for (int32_t p = first; p <= position; ++p) {
      const float* v = cached(s, op.layer, 1, kv_head, p);
      for (int64_t d = 0; d < dim; ++d) out[d] += weight[p - first] / denominator * v[d];
    }
    float* a = &attention_[((s.first_row + i) * static_cast<int64_t>(spec_.heads) + head) * dim];
    for (int64_t d = 0; d < dim; ++d) a[d] = static_cast<float>(out[d]);
  }

  // The k largest scores (ties and NaN to the lower index) and their weights.
  static void choose(const Route& op, const float* scores, int32_t* chosen, float* weights) {
    const auto experts = own(*op.router.weight).rows;
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](int32_t e) {
      return std::isnan(scores[e]) ? -std::numeric_limits<float>::infinity() : scores[e];
    };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
    const double top = scores[order[0]];
    double chosen_sum = 0, all_sum = 0;
    for (int64_t e = 0; e < experts; ++e) all_sum += std::exp(scores[e] - top);
    for (int i = 0; i < op.experts_per_token; ++i) chosen_sum += std::exp(scores[order[i]] - top);
    // Softmax over all, renormalized over the chosen, is softmax over the chosen.
    const double sum = op.weighting == Route::Weighting::kSoftmaxAll ? all_sum : chosen_sum;
    for (int i = 0; i < op.experts_per_token; ++i) {
      chosen[i] = order[i];
      weights[i] = static_cast<float>(std::exp(scores[order[i]] - top) / sum);
    }
  }

  static float activate(const Experts& op, float gate, float up) {
    if (op.activation == Experts::Activation::kSilu) {
      return static_cast<float>(gate * sigmoid(gate) * up);
    }
    const double g = std::min(gate, op.limit), u = std::clamp(up, -op.limit, op.limit);
    return static_cast<float>(g * sigmoid(op.alpha * g) * (u + 1.0));
  }

  ExecutorSpec spec_;
  DType kv_type_;
  Batch batch_;
  int64_t rows_ = 0;
  Floats residual_, normed_, query_, key_, value_, attention_, chosen_weight_, logits_;
  std::vector<int32_t> chosen_;
  std::vector<Floats> pools_;  // per group: [blocks][layers][key, value][kv_heads][16][head_dim]
};

}  // namespace

size_t reference_workspace_bytes(const ExecutorSpec& spec) {
  const size_t per_row = 2 * spec.hidden + 2 * (spec.heads + spec.kv_heads) * spec.head_dim +
                         2 * spec.experts_per_token + 2 * spec.ffn;
  return sizeof(float) * (per_row * spec.max_tokens + static_cast<size_t>(spec.max_logit_rows) * spec.vocab);
}

std::unique_ptr<Executor> make_reference_executor(const ExecutorSpec& spec) {
  return std::make_unique<ReferenceExecutor>(spec);
}

}  // namespace millrace
