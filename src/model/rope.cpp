#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "io/hf_directory.h"
#include "kernels/quant/codec.h"

namespace millrace {
namespace {

struct Scaling {
  std::string type = "none";
  double factor = 1;
  double original_context = 0;
  double beta_fast = 32, beta_slow = 1;              // yarn
  bool truncate = true;                              // yarn
  double attention_factor = 0;                       // yarn; 0: from the factor
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
};

// YaRN (Peng et al. 2023): dimensions that turn often within the trained context keep their angle, those that
// turn less than once are interpolated, a linear ramp between.
void apply_yarn(const Scaling& s, double theta, std::vector<double>& inv_freq, ModelConfig& config) {
  const double dims = config.rotary_dims;
  const auto dimension_turning = [&](double turns) {
    return dims * std::log(s.original_context / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = dimension_turning(s.beta_fast), high = dimension_turning(s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / s.factor * ramp + inv_freq[i] * (1 - ramp);
  }
  config.rope_magnitude = static_cast<float>(
      s.attention_factor > 0 ? s.attention_factor : (s.factor > 1 ? 0.1 * std::log(s.factor) + 1.0 : 1.0));
}

// Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth ramp between.
void apply_llama3(const Scaling& s, std::vector<double>& inv_freq) {
  for (double& f : inv_freq) {
    const double turns = s.original_context * f / (2 * std::numbers::pi);
    if (turns < s.low_freq_factor) {
      f /= s.factor;
    } else if (turns < s.high_freq_factor) {
      const double smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      f = (1 - smooth) * f / s.factor + smooth * f;
    }
  }
}

Scaling read_gguf_scaling(const ConfigReader& reader, const ModelConfig& config, bool truncate) {
  const io::Gguf& gguf = *reader.checkpoint().gguf;
  Scaling s;
  s.type = gguf.get_string(config.architecture + ".rope.scaling.type", "none");
  s.factor = reader.real_or("rope.scaling.factor", "", 1.0);
  s.original_context = reader.real_or("rope.scaling.original_context_length", "", config.context_length);
  s.beta_fast = reader.real_or("rope.scaling.yarn_beta_fast", "", 32);
  s.beta_slow = reader.real_or("rope.scaling.yarn_beta_slow", "", 1);
  s.attention_factor = reader.real_or("rope.scaling.attn_factor", "", 0);
  s.truncate = truncate;
  return s;
}

// rope_parameters (newer) holds theta too; rope_scaling (older) stands beside rope_theta.
const nlohmann::json& hf_rope_object(const nlohmann::json& config) {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    const auto it = config.find(field);
    if (it != config.end() && it->is_object()) return *it;
  }
  return kEmpty;
}

Scaling read_hf_scaling(const ConfigReader& reader, const ModelConfig& config, bool truncate) {
  const nlohmann::json& object = hf_rope_object(reader.hf());
  Scaling s;
  for (const char* field : {"rope_type", "type"}) {
    const auto it = object.find(field);
    if (it == object.end()) continue;
    if (!it->is_string())
      reader.fail(fmt::format("config.json: rope_scaling.{}", field), it->type_name(), "a string");
    s.type = it->get<std::string>();
    break;
  }
  if (s.type == "default") s.type = "none";
  if (s.type == "none") return s;
  s.factor = reader.hf_real(object, "factor");
  s.original_context = reader.hf_real_or(object, "original_max_position_embeddings", config.context_length);
  s.beta_fast = reader.hf_real_or(object, "beta_fast", 32);
  s.beta_slow = reader.hf_real_or(object, "beta_slow", 1);
  s.attention_factor = reader.hf_real_or(object, "attention_factor", 0);
  const auto truncate_field = object.find("truncate");
  s.truncate =
      truncate_field != object.end() && truncate_field->is_boolean() ? truncate_field->get<bool>() : truncate;
  if (s.type == "llama3") {
    s.low_freq_factor = reader.hf_real(object, "low_freq_factor");
    s.high_freq_factor = reader.hf_real(object, "high_freq_factor");
  }
  return s;
}

// llama.cpp's form of the llama3 scaling: a tensor of divisors, one per angle.
void apply_gguf_divisors(const ConfigReader& reader, std::vector<double>& inv_freq) {
  const TensorView* view = reader.checkpoint().find_tensor("rope_freqs.weight");
  if (view == nullptr) return;
  if (view->elements() != static_cast<int64_t>(inv_freq.size()) || view->type != DType::kF32) {
    reader.fail("rope_freqs.weight",
                fmt::format("{} elements of {}", view->elements(), info(view->type).name),
                fmt::format("{} of f32", inv_freq.size()));
  }
  std::vector<float> divisors(inv_freq.size());
  quant::dequantize(DType::kF32, view->data, divisors.data(), view->elements());
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    if (!(divisors[i] > 0)) {
      reader.fail(fmt::format("rope_freqs.weight[{}]", i), fmt::format("{}", divisors[i]),
                  "a positive number");
    }
    inv_freq[i] /= divisors[i];
  }
}

}  // namespace

void read_rope(const ConfigReader& reader, ModelConfig& config, bool truncate_yarn_range) {
  config.rope_theta = reader.real_or("rope.freq_base", "rope_theta", 10000.0);
  config.rotary_dims = reader.integer_or("rope.dimension_count", "", 2, config.head_dim, config.head_dim);
  if (!reader.is_gguf()) {
    const nlohmann::json& object = hf_rope_object(reader.hf());
    config.rope_theta = reader.hf_real_or(object, "rope_theta", config.rope_theta);
    const double partial = reader.hf_real_or(reader.hf(), "partial_rotary_factor",
                                             reader.hf_real_or(object, "partial_rotary_factor", 1.0));
    if (!(partial > 0 && partial <= 1))
      reader.fail("config.json: partial_rotary_factor", fmt::format("{}", partial), "above 0, at most 1");
    config.rotary_dims = static_cast<int32_t>(config.head_dim * partial);
  }
  if (config.rotary_dims % 2 != 0 || config.rotary_dims < 2) {
    reader.fail("rotary dimensions", fmt::format("{}", config.rotary_dims), "an even number from 2");
  }
  if (!(config.rope_theta > 1)) reader.fail("rope theta", fmt::format("{}", config.rope_theta), "above 1");

  std::vector<double> inv_freq(config.rotary_dims / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.rotary_dims);
  }

  const Scaling s = reader.is_gguf() ? read_gguf_scaling(reader, config, truncate_yarn_range)
                                     : read_hf_scaling(reader, config, truncate_yarn_range);
  if (!(s.factor > 0)) reader.fail("rope scaling factor", fmt::format("{}", s.factor), "above 0");
  if (s.type != "none" && s.type != "linear" && !(s.original_context >= 1)) {
    reader.fail("rope scaling original context", fmt::format("{}", s.original_context), "at least 1");
  }
  if (s.type == "linear") {
    config.rope_scaling = RopeScaling::kLinear;
    for (double& f : inv_freq) f /= s.factor;
  } else if (s.type == "llama3") {
    config.rope_scaling = RopeScaling::kLlama3;
    if (!(s.high_freq_factor > s.low_freq_factor)) {
      reader.fail("rope scaling high_freq_factor", fmt::format("{}", s.high_freq_factor),
                  "above low_freq_factor");
    }
    apply_llama3(s, inv_freq);
  } else if (s.type == "yarn") {
    config.rope_scaling = RopeScaling::kYarn;
    apply_yarn(s, config.rope_theta, inv_freq, config);
  } else if (s.type != "none") {
    throw_error(ErrorCode::kUnsupported,
                "{}: rope scaling: found \"{}\", expected none, linear, llama3 or yarn",
                reader.checkpoint().path(), s.type);
  }
  if (reader.is_gguf()) apply_gguf_divisors(reader, inv_freq);
  for (const double f : inv_freq) config.rope_inv_freq.push_back(static_cast<float>(f));
}

void write_rope(GgufKeys& keys) {
  const ConfigReader& reader = keys.reader();
  const nlohmann::json& rope = hf_rope_object(reader.hf());
  keys.real("rope.freq_base", keys.config().rope_theta);
  const std::string type = rope.value("rope_type", rope.value("type", std::string("default")));
  if (type == "yarn" || type == "linear") {
    keys.text("rope.scaling.type", type);
    keys.real("rope.scaling.factor", reader.hf_real(rope, "factor"));
  }
  if (type == "yarn") {
    keys.size("rope.scaling.original_context_length",
              static_cast<int64_t>(reader.hf_real(rope, "original_max_position_embeddings")));
  }
}

}  // namespace millrace
