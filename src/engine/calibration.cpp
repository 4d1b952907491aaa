#include "engine/calibration.h"

#include <fmt/core.h>

#include <cmath>
#include <string_view>

#include "backend/forwarding_executor.h"
#include "base/error.h"
#include "kernels/quant/codec.h"
#include "model/model.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

std::vector<float> decoded_row(const TensorView& view, int64_t row) {
  std::vector<float> out(static_cast<size_t>(view.cols()));
  quant::dequantize_row(view, row, out.data());
  return out;
}

float dot(const float* a, const float* b, int64_t count) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  float sum = 0.0f;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (const float lane : lanes) sum += lane;
  return sum;
}

class InputObserver final : public ForwardingExecutor {
 public:
  InputObserver(std::unique_ptr<Executor> inner, const io::Checkpoint& checkpoint, const ModelConfig& config,
                Calibration& calibration)
      : ForwardingExecutor(std::move(inner)),
        config_(config),
        source_(checkpoint, config, /*gather=*/true),
        tied_(has_tied_output(checkpoint)),
        calibration_(calibration),
        pool_(0) {}

  void begin(const Batch& batch) override {
    layer_ = 0;
    rows_ = static_cast<int64_t>(batch.tokens.size());
    logit_rows_.assign(batch.logit_rows.begin(), batch.logit_rows.end());
    Batch all = batch;
    all.only_logits = false;  // every row is read below
    inner().begin(all);
  }

  void norm_qkv(const NormQkv& op) override {
    if (op.head_dim != 0 || op.k.weight == nullptr) refuse("layers whose heads differ");
    const std::vector<float> x = normed(&LayerWeights::attn_norm);
    add({"attn_q.weight", "attn_k.weight", "attn_v.weight"}, x, config_.hidden);
    inner().norm_qkv(op);
  }

  void norm_latent_qkv(const NormLatentQkv&) override { refuse("latent attention"); }
  void layer_inputs(const LayerInputs&) override { refuse("layers with inputs"); }
  void end_layer(const EndLayer&) override { refuse("layers with inputs or scales"); }

  void time_mix(const TimeMix&) override {
    throw_error(ErrorCode::kUnsupported,
                "{}: the inputs of a time mix's matrices are not measured; name a type",
                config_.architecture);
  }

  void project_add(const Projection& op) override {
    add({"attn_output.weight"}, inner().read_slot(Slot::kAttention),
        static_cast<int64_t>(config_.heads) * config_.head_dim);
    inner().project_add(op);
  }

  void ffn_add(const Ffn& op) override {
    const std::vector<float> x = normed(&LayerWeights::ffn_norm);
    add({"ffn_gate.weight", "ffn_up.weight"}, x, config_.hidden);
    add({"ffn_down.weight"}, hidden_of(x), config_.ffn);
    inner().ffn_add(op);
    ++layer_;
  }

  void experts_add(const Experts& op) override {
    if (op.norm.present()) refuse("experts with norms");
    const std::vector<float> x = normed(&LayerWeights::ffn_norm);
    add({"ffn_gate_exps.weight", "ffn_up_exps.weight"}, x, config_.hidden);
    inner().experts_add(op);
    ++layer_;
  }

  void norm_logits(const Logits& op) override {
    if (!logit_rows_.empty()) {
      const std::vector<float> x = normed_by(-1, "output_norm.weight");
      accumulate({tied_ ? "token_embd.weight" : "output.weight"}, x, config_.hidden);
    }
    inner().norm_logits(op);
  }

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw_error(ErrorCode::kUnsupported, "{}: the inputs of the matrices of {} are not measured; name a type",
                config_.architecture, what);
  }

  // The residual stream behind the layer's norm of that place, if it has one, [rows, hidden].
  std::vector<float> normed(WeightMember norm) {
    for (const WeightSpec& spec : source_.specs(layer_)) {
      if (spec.to == norm) return normed_by(layer_, spec.role);
    }
    return inner().read_slot(Slot::kResidual);
  }

  // The same by RMSNorm with these weights.
  std::vector<float> normed_by(int layer, std::string_view role) {
    std::vector<float> x = inner().read_slot(Slot::kResidual);
    const std::vector<float> weight = decoded_row(source_.require(layer, role, {config_.hidden}), 0);
    source_.take_gathered();  // decoded
    for (int64_t r = 0; r < rows_; ++r) {
      float* row = x.data() + r * config_.hidden;
      const float scale =
          1.0f /
          std::sqrt(dot(row, row, config_.hidden) / static_cast<float>(config_.hidden) + config_.norm_eps);
      for (int64_t c = 0; c < config_.hidden; ++c) row[c] *= scale * weight[static_cast<size_t>(c)];
    }
    return x;
  }

  // act(gate x) * (up x), [rows, ffn], in plain float32.
  std::vector<float> hidden_of(const std::vector<float>& x) {
    const int64_t ffn = config_.ffn, hidden = config_.hidden;
    const TensorView gate = source_.require(layer_, "ffn_gate.weight", {ffn, hidden}),
                     up = source_.require(layer_, "ffn_up.weight", {ffn, hidden});
    const auto bias = [&](const char* role) {
      const auto view = source_.find(layer_, role, {ffn});
      return view ? decoded_row(*view, 0) : std::vector<float>(static_cast<size_t>(ffn), 0.0f);
    };
    const std::vector<float> gate_bias = bias("ffn_gate.bias"), up_bias = bias("ffn_up.bias");
    std::vector<float> out(static_cast<size_t>(rows_ * ffn));
    pool_.parallel_for(ffn, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t f = begin; f < end; ++f) {
        const std::vector<float> g = decoded_row(gate, f), u = decoded_row(up, f);
        for (int64_t r = 0; r < rows_; ++r) {
          const float* row = x.data() + r * hidden;
          const float a = dot(g.data(), row, hidden) + gate_bias[static_cast<size_t>(f)];
          const float b = dot(u.data(), row, hidden) + up_bias[static_cast<size_t>(f)];
          out[static_cast<size_t>(r * ffn + f)] = activated(a) * b;
        }
      }
    });
    return out;
  }

  float activated(float x) const {
    if (config_.ffn_activation != Activation::kGeluTanh) return x / (1.0f + std::exp(-x));
    return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  }

  void add(std::initializer_list<const char*> roles, const std::vector<float>& x, int64_t cols) {
    std::vector<std::string> names;
    for (const char* role : roles) names.push_back(fmt::format("blk.{}.{}", layer_, role));
    accumulate(names, x, cols);
  }

  // `x` [rows, cols] is the input of all of `names`.
  void accumulate(const std::vector<std::string>& names, const std::vector<float>& x, int64_t cols) {
    quant::MatrixInputs& inputs = calibration_[names[0]];
    if (inputs.squares.empty()) {
      inputs.squares.resize(static_cast<size_t>(cols));
      const size_t bytes = static_cast<size_t>(cols * cols) * sizeof(float);
      if (bytes <= kMaxProductBytes && products_bytes_ + bytes <= kMaxProductsBytes) {
        products_bytes_ += bytes;
        inputs.products = std::make_shared<std::vector<float>>(static_cast<size_t>(cols * cols));
      }
    }
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols; ++c) inputs.squares[c] += x[r * cols + c] * x[r * cols + c];
    }
    if (inputs.products) add_products(x, cols, *inputs.products);
    for (size_t i = 1; i < names.size(); ++i) calibration_[names[i]] = inputs;
  }

  void add_products(const std::vector<float>& x, int64_t cols, std::vector<float>& products) {
    pool_.parallel_for(cols, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t r = 0; r < rows_; ++r) {
          const float* row = x.data() + r * cols;
          float* out = products.data() + i * cols;
          const float factor = row[i];
          for (int64_t j = i; j < cols; ++j) out[j] += factor * row[j];
        }
      }
    });
  }

  const ModelConfig& config_;
  WeightSource source_;
  bool tied_;
  Calibration& calibration_;
  ThreadPool pool_;
  size_t products_bytes_ = 0;
  int layer_ = 0;
  int64_t rows_ = 0;
  std::vector<int32_t> logit_rows_;
};

}  // namespace

std::unique_ptr<Executor> observe_inputs(std::unique_ptr<Executor> inner, const io::Checkpoint& checkpoint,
                                         const ModelConfig& config, Calibration& calibration) {
  return std::make_unique<InputObserver>(std::move(inner), checkpoint, config, calibration);
}

}  // namespace millrace
