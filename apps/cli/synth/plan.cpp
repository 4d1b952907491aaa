#include "synth/plan.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/config_reader.h"
#include "quant/type_request.h"

namespace millrace::cli {
namespace {

// The rope_scaling object (rope_parameters in newer files), or an empty one.
nlohmann::json rope_scaling(const nlohmann::json& config) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto it = config.find(key);
    if (it != config.end() && it->is_object()) return *it;
  }
  return nlohmann::json::object();
}

std::string rope_type(const nlohmann::json& rope) {
  for (const char* key : {"rope_type", "type"}) {
    const auto it = rope.find(key);
    if (it != rope.end() && it->is_string()) return it->get<std::string>();
  }
  return "default";
}

// The type that fits the rows.
DType fitting(DType type, int64_t cols) {
  if (cols % info(type).block_elements != 0) type = DType::kQ8_0;
  if (cols % info(type).block_elements != 0) type = DType::kF16;
  return type;
}

// Lists the tensors of one model, layer by layer in the order llama.cpp's converter does.
class TensorPlanner {
 public:
  TensorPlanner(const nlohmann::json& config, const std::string& source, const SynthTypes& types) {
    plan_.checkpoint.hf = std::make_shared<io::HfDirectory>();
    plan_.checkpoint.hf->path = source;
    plan_.checkpoint.hf->config = config;
    architecture_ = &find_architecture(plan_.checkpoint);
    matrix_type_ = types.matrix;
    expert_type_ = types.experts.value_or(architecture_->expert_type().value_or(types.matrix));
  }

  SynthPlan make() {
    ModelConfig& c = plan_.config;
    c.architecture = architecture_->name();
    c.name = plan_.checkpoint.path();
    const ConfigReader read(plan_.checkpoint, *architecture_);
    architecture_->read_config(read, c);
    c.vocab = read.integer("", "vocab_size", 1, 1 << 24);
    const double spread = 1.0 / std::sqrt(static_cast<double>(c.hidden));
    add("token_embd.weight", matrix_type_, {c.vocab, c.hidden}, spread);
    for (int32_t layer = 0; layer < c.layers; ++layer) add_layer(layer);
    const HfNames names = architecture_->hf_names();
    if (names.has_output_norm) add(std::string(names.gguf_output_norm), DType::kF32, {c.hidden}, 0.0);
    const auto tied = read.hf().find("tie_word_embeddings");
    if (!c.encoder && (tied == read.hf().end() || *tied != true))
      add("output.weight", matrix_type_, {c.vocab, c.hidden}, spread);
    for (const WeightSpec& spec : architecture_->outer_weights(c)) add_spec("", spec);
    add_rope_factors(read);
    return std::move(plan_);
  }

 private:
  void add(std::string name, DType type, std::vector<int64_t> shape, double spread) {
    type = fitting(type, shape.back());
    plan_.tensors.push_back({std::move(name), type, std::move(shape), spread, {}});
  }

  void add_layer(int32_t layer) {
    for (const WeightSpec& spec : architecture_->layer_weights(plan_.config, layer)) {
      add_spec(fmt::format("blk.{}.", layer), spec);
    }
  }

  void add_spec(const std::string& before, const WeightSpec& spec) {
    if (spec.presence == Presence::kRare) return;
    TensorView view;
    view.rank = static_cast<int>(spec.shape.size());
    std::copy(spec.shape.begin(), spec.shape.end(), view.shape.begin());
    const bool small = quant::part_of(spec.role, view, false) == quant::Part::kSmall;
    const DType type = small ? DType::kF32 : spec.experts ? expert_type_ : matrix_type_;
    const std::string_view name = spec.gguf.empty() ? spec.role : spec.gguf.front();
    add(before + std::string(name), type, spec.shape, spec.spread);
    if (spec.synthetic)
      plan_.tensors.back().values.assign(static_cast<size_t>(view.elements()), *spec.synthetic);
  }

  // Llama 3's scaling travels in GGUF as divisors of the frequencies, [head_dim / 2].
  void add_rope_factors(const ConfigReader& read) {
    const nlohmann::json rope = rope_scaling(plan_.checkpoint.hf->config);
    const std::vector<float>& angles = plan_.config.rope_inv_freq;
    if (std::find(angles.begin(), angles.end(), 0.0f) != angles.end()) return add_rope_divisors();
    if (rope_type(rope) != "llama3") return;
    const int32_t head_dim = plan_.config.head_dim;
    const double theta = read.real_or("", "rope_theta", 10000.0);
    const double factor = read.hf_real(rope, "factor"), low = read.hf_real(rope, "low_freq_factor");
    const double high = read.hf_real(rope, "high_freq_factor");
    const double original = read.hf_real(rope, "original_max_position_embeddings");
    SynthTensor factors{"rope_freqs.weight", DType::kF32, {head_dim / 2}, 0.0, {}};
    for (int32_t i = 0; i < head_dim / 2; ++i) {
      const double wavelength = 2.0 * std::numbers::pi * std::pow(theta, 2.0 * i / head_dim);
      const double smooth = std::clamp((original / wavelength - low) / (high - low), 0.0, 1.0);
      factors.values.push_back(static_cast<float>(1.0 / ((1.0 - smooth) / factor + smooth)));
    }
    plan_.tensors.push_back(std::move(factors));
  }

  // Dimensions that do not turn (Gemma 4) are divided by 1e30, as in llama.cpp's files.
  void add_rope_divisors() {
    const ModelConfig& c = plan_.config;
    SynthTensor divisors{"rope_freqs.weight", DType::kF32, {c.rotary_dims / 2}, 0.0, {}};
    for (size_t i = 0; i < c.rope_inv_freq.size(); ++i) {
      const double plain = std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / c.rotary_dims);
      const float turned = c.rope_inv_freq[i];
      divisors.values.push_back(turned == 0.0f ? 1e30f : static_cast<float>(plain / turned));
    }
    plan_.tensors.push_back(std::move(divisors));
  }

  SynthPlan plan_;
  const Architecture* architecture_ = nullptr;
  DType matrix_type_ = DType::kF32, expert_type_ = DType::kF32;
};

}  // namespace

SynthPlan make_plan(const nlohmann::json& config, const std::string& source, const SynthTypes& types) {
  return TensorPlanner(config, source, types).make();
}

}  // namespace millrace::cli
