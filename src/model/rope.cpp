#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "io/hf_directory.h"
#include "kernels/quant/codec.h"

namespace millrace {

std::vector<double> gguf_divisors(const ConfigReader& reader, const std::string& name, size_t count) {
  const TensorView* view = reader.checkpoint().find_tensor(name);
  if (view == nullptr) return {};
  if (view->elements() != static_cast<int64_t>(count) || view->type != DType::kF32) {
    reader.fail(name, fmt::format("{} elements of {}", view->elements(), info(view->type).name),
                fmt::format("{} of f32", count));
  }
  std::vector<float> values(count);
  quant::dequantize(DType::kF32, view->data, values.data(), view->elements());
  return {values.begin(), values.end()};
}

namespace {

struct Scaling {
  std::string type = "none";
  double factor = 1;
  double original_context = 0;
  double beta_fast = 32, beta_slow = 1;              // yarn
  bool truncate = true;                              // yarn
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  std::vector<double> divisors = {};                 // longrope: of contexts up to the original one
  std::vector<double> long_divisors = {};            // and of longer ones
  double magnitude = 1;                              // of the rotated vectors
};

constexpr std::string_view kYarnLogKey = "rope.scaling.yarn_log_multiplier";

// YaRN's default magnitude (Peng et al. 2023, equation 22), with DeepSeek's factor on the logarithm.
double yarn_magnitude(double factor, double mscale = 1) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// YaRN (Peng et al. 2023): dimensions that turn often within the trained context keep their angle, those that
// turn less than once are interpolated, a linear ramp between.
void apply_yarn(const Scaling& s, const ModelConfig& config, std::vector<double>& inv_freq) {
  const double dims = config.rotary_dims;
  const auto dimension_turning = [&](double turns) {
    return dims * std::log(s.original_context / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config.rope_theta));
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

// rope.scaling.attn_factor multiplies what the type implies, as in llama.cpp.
Scaling read_gguf_scaling(const ConfigReader& reader, const ModelConfig& config, bool truncate) {
  const io::Gguf& gguf = *reader.checkpoint().gguf;
  Scaling s;
  // A factor without a type is linear, and older files have another key for it.
  s.type = gguf.get_string(config.architecture + ".rope.scaling.type", "linear");
  s.factor = reader.real_or("rope.scaling.factor", "", reader.real_or("rope.scale_linear", "", 1.0));
  if (s.factor == 0) s.factor = 1;
  if (s.type == "linear" && s.factor == 1) s.type = "none";
  s.original_context = reader.real_or("rope.scaling.original_context_length", "", config.context_length);
  s.beta_fast = reader.real_or("rope.scaling.yarn_beta_fast", "", 32);
  s.beta_slow = reader.real_or("rope.scaling.yarn_beta_slow", "", 1);
  s.truncate = truncate;
  s.magnitude = reader.real_or("rope.scaling.attn_factor", "", 1.0);
  if (s.type == "yarn") {
    // Latent attention scales the scores instead (yarn_score_scale); Mistral's files have mscale_all_dim
    // here.
    const double all = reader.real_or(kYarnLogKey, "", 0.0);
    const bool scores = all != 0 && config.latent.rank > 0;
    const double implied =
        scores ? 1.0 : yarn_magnitude(s.factor) / (all == 0 ? 1.0 : yarn_magnitude(s.factor, all));
    // Where config.json says attention_factor, llama.cpp's converter has it under a key of its own.
    s.magnitude *= reader.real_or("rope.scaling.yarn_attn_factor", "", implied);
  }
  const size_t angles = static_cast<size_t>(config.rotary_dims) / 2;
  // llama.cpp's converter names no type for them.
  s.divisors = gguf_divisors(reader, "rope_factors_short.weight", angles);
  s.long_divisors = gguf_divisors(reader, "rope_factors_long.weight", angles);
  if (!s.divisors.empty()) s.type = "longrope";
  return s;
}

// rope_scaling (older) stands beside rope_theta; rope_parameters (newer) holds theta too.
const nlohmann::json& hf_rope_object(const nlohmann::json& config) {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  for (const char* field : {"rope_scaling", "rope_parameters"}) {
    const auto it = config.find(field);
    if (it != config.end() && it->is_object() && !it->empty()) return *it;
  }
  return kEmpty;
}

std::string hf_rope_type(const ConfigReader& reader, const nlohmann::json& object) {
  for (const char* field : {"rope_type", "type"}) {
    const auto it = object.find(field);
    if (it == object.end()) continue;
    if (!it->is_string())
      reader.fail(fmt::format("config.json: rope_scaling.{}", field), it->type_name(), "a string");
    const std::string type = it->get<std::string>();
    return type == "default" ? "none" : type;
  }
  return "none";
}

void read_hf_yarn(const ConfigReader& reader, const nlohmann::json& object, Scaling& s) {
  const auto or_default = [&](const char* field, double fallback) {
    const double value = reader.hf_real_or(object, field, fallback);
    return value == 0 ? fallback : value;
  };
  s.beta_fast = or_default("beta_fast", 32);
  s.beta_slow = or_default("beta_slow", 1);
  const auto truncate = object.find("truncate");
  s.truncate = truncate == object.end() || !truncate->is_boolean() || truncate->get<bool>();
  const double mscale = reader.hf_real_or(object, "mscale", 0);
  const double mscale_all = reader.hf_real_or(object, "mscale_all_dim", 0);
  const double implied = mscale != 0 && mscale_all != 0
                             ? yarn_magnitude(s.factor, mscale) / yarn_magnitude(s.factor, mscale_all)
                             : yarn_magnitude(s.factor);
  s.magnitude = reader.hf_real_or(object, "attention_factor", implied);
}

std::vector<double> hf_divisors(const ConfigReader& reader, const nlohmann::json& object, const char* field,
                                size_t angles) {
  const auto factors = object.find(field);
  const std::string where = fmt::format("config.json: rope_scaling.{}", field);
  if (factors == object.end() || !factors->is_array() || factors->size() != angles)
    reader.fail(where, factors == object.end() ? "nothing" : fmt::format("{} values", factors->size()),
                fmt::format("{} numbers", angles));
  std::vector<double> out;
  for (const nlohmann::json& factor : *factors) {
    if (!factor.is_number()) reader.fail(where, factor.dump(), "numbers");
    out.push_back(factor.get<double>());
  }
  return out;
}

void read_hf_longrope(const ConfigReader& reader, const nlohmann::json& object, const ModelConfig& config,
                      Scaling& s) {
  const size_t angles = static_cast<size_t>(config.rotary_dims) / 2;
  s.divisors = hf_divisors(reader, object, "short_factor", angles);
  const auto longer = object.find("long_factor");  // where it does not fit, contexts end with the short ones
  if (longer != object.end() && longer->is_array() && longer->size() == angles)
    s.long_divisors = hf_divisors(reader, object, "long_factor", angles);
  const double implied =
      s.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(s.factor) / std::log(s.original_context));
  s.magnitude = reader.hf_real_or(object, "attention_factor", implied);
}

Scaling read_hf_scaling(const ConfigReader& reader, const ModelConfig& config) {
  const nlohmann::json& object = hf_rope_object(reader.hf());
  Scaling s;
  s.type = hf_rope_type(reader, object);
  if (s.type == "none") return s;
  // Beside the object it counts more than in it.
  s.original_context =
      reader.hf_real_or(reader.hf(), "original_max_position_embeddings",
                        reader.hf_real_or(object, "original_max_position_embeddings", config.context_length));
  const bool has_factor = object.contains("factor") && !object["factor"].is_null();
  const bool may_lack_it = s.type == "yarn" || s.type == "longrope";
  s.factor = has_factor || !may_lack_it ? reader.hf_real(object, "factor")
                                        : config.context_length / s.original_context;
  if (s.type == "yarn") read_hf_yarn(reader, object, s);
  if (s.type == "longrope") read_hf_longrope(reader, object, config, s);
  if (s.type == "llama3") {
    s.low_freq_factor = reader.hf_real(object, "low_freq_factor");
    s.high_freq_factor = reader.hf_real(object, "high_freq_factor");
  }
  return s;
}

void divide(const ConfigReader& reader, const std::vector<double>& divisors, std::vector<double>& inv_freq) {
  for (size_t i = 0; i < divisors.size(); ++i) {
    if (!(divisors[i] > 0)) {
      reader.fail(fmt::format("rotary divisor {}", i), fmt::format("{}", divisors[i]), "a positive number");
    }
    inv_freq[i] /= divisors[i];
  }
}

void check_scaling(const ConfigReader& reader, const Scaling& s) {
  if (!(s.factor > 0)) reader.fail("rope scaling factor", fmt::format("{}", s.factor), "above 0");
  if (s.type != "none" && s.type != "linear" && !(s.original_context >= 1)) {
    reader.fail("rope scaling original context", fmt::format("{}", s.original_context), "at least 1");
  }
  if (s.type == "llama3" && !(s.high_freq_factor > s.low_freq_factor)) {
    reader.fail("rope scaling high_freq_factor", fmt::format("{}", s.high_freq_factor),
                "above low_freq_factor");
  }
  if (!(s.magnitude > 0) || !std::isfinite(s.magnitude)) {
    reader.fail("rope scaling attention_factor", fmt::format("{}", s.magnitude), "above 0");
  }
}

void apply_scaling(const ConfigReader& reader, const Scaling& s, ModelConfig& config,
                   std::vector<double>& inv_freq) {
  if (s.type == "linear") {
    for (double& f : inv_freq) f /= s.factor;
  } else if (s.type == "llama3") {
    apply_llama3(s, inv_freq);
  } else if (s.type == "yarn") {
    apply_yarn(s, config, inv_freq);
  } else if (s.type == "longrope") {
    // The long factors would turn what is cached by the short ones: contexts end where those do, unless
    // all of a model's are longer.
    std::vector<double> longer = inv_freq;
    divide(reader, s.divisors, inv_freq);
    divide(reader, s.long_divisors, longer);
    const auto original = static_cast<int32_t>(s.original_context);
    if (!s.long_divisors.empty() && config.context_length > original) {
      config.rope_long_inv_freq.assign(longer.begin(), longer.end());
      config.rope_long_context = config.context_length;
    }
    config.context_length = std::min(config.context_length, original);
  } else if (s.type != "none" && s.type != "dynamic") {
    // dynamic: the angles change beyond the trained context only.
    throw_error(ErrorCode::kUnsupported,
                "{}: rope scaling: found \"{}\", expected none, linear, dynamic, llama3, yarn or longrope",
                reader.checkpoint().path(), s.type);
  }
  config.rope_magnitude = static_cast<float>(s.magnitude);
}

std::vector<double> unscaled(double theta, int32_t dims) {
  std::vector<double> inv_freq(static_cast<size_t>(dims) / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i)
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / dims);
  return inv_freq;
}

}  // namespace

double yarn_score_scale(const ConfigReader& reader) {
  // Rounded as GGUF's keys are.
  const auto scale = [](double log_multiplier, double factor) {
    const auto multiplier = static_cast<float>(log_multiplier), by = static_cast<float>(factor);
    return multiplier == 0 || by <= 1 ? 1.0 : 1.0 + double{multiplier} * std::log(double{by});
  };
  if (reader.is_gguf()) {
    return scale(reader.real_or(kYarnLogKey, "", 0), reader.real_or("rope.scaling.factor", "", 1));
  }
  const nlohmann::json& object = hf_rope_object(reader.hf());
  if (hf_rope_type(reader, object) == "none") return 1.0;
  const double all = reader.hf_real_or(object, "mscale_all_dim", 0);
  return all == 0 ? 1.0 : scale(0.1 * all, reader.hf_real(object, "factor"));
}

std::vector<float> plain_angles(double theta, int32_t dims) {
  const std::vector<double> inv_freq = unscaled(theta, dims);
  return {inv_freq.begin(), inv_freq.end()};
}

int32_t hf_rotary_dims(const ConfigReader& reader, int32_t head_dim) {
  const double beside = reader.hf_real_or(reader.hf(), "partial_rotary_factor", 1.0);
  const double factor = reader.hf_real_or(hf_rope_object(reader.hf()), "partial_rotary_factor", beside);
  const auto dims = static_cast<int32_t>(head_dim * factor);
  if (!(factor > 0 && factor <= 1) || dims < 2) {
    reader.fail("config.json: partial_rotary_factor", fmt::format("{}", factor), "above 0, at most 1");
  }
  return dims;
}

void read_rope(const ConfigReader& reader, ModelConfig& config, bool truncate_yarn_range) {
  config.rope_theta = reader.real_or("rope.freq_base", "rope_theta", 10000.0);
  const int32_t usual = config.rotary_dims > 0 ? config.rotary_dims : config.head_dim;
  config.rotary_dims = reader.integer_or("rope.dimension_count", "", 2, config.head_dim, usual);
  if (!reader.is_gguf()) {
    config.rope_theta = reader.hf_real_or(hf_rope_object(reader.hf()), "rope_theta", config.rope_theta);
  }
  if (config.rotary_dims % 2 != 0 || config.rotary_dims < 2) {
    reader.fail("rotary dimensions", fmt::format("{}", config.rotary_dims), "an even number from 2");
  }
  if (!(config.rope_theta > 1)) reader.fail("rope theta", fmt::format("{}", config.rope_theta), "above 1");

  std::vector<double> inv_freq = unscaled(config.rope_theta, config.rotary_dims);
  const Scaling s = reader.is_gguf() ? read_gguf_scaling(reader, config, truncate_yarn_range)
                                     : read_hf_scaling(reader, config);
  check_scaling(reader, s);
  apply_scaling(reader, s, config, inv_freq);
  config.rope_as_tensor =
      s.type == "llama3" || s.type == "longrope" || (s.type == "yarn" && s.truncate != truncate_yarn_range);
  if (reader.is_gguf()) divide(reader, gguf_divisors(reader, "rope_freqs.weight", inv_freq.size()), inv_freq);
  for (const double f : inv_freq) config.rope_inv_freq.push_back(static_cast<float>(f));
}

void settle_rope_of_layers(nlohmann::json& config) {
  const nlohmann::json both = config.value("rope_parameters", nlohmann::json());
  config.erase("rope_parameters");
  // The classes read both for each kind of layer, where they are not looked for.
  config.erase("original_max_position_embeddings");
  const auto part = [&](const char* kind) {
    const auto it = both.is_object() ? both.find(kind) : both.end();
    return !both.is_object() || it == both.end() || !it->is_object() ? nlohmann::json::object() : *it;
  };
  // Older files' rope_scaling goes on top of the newer keys, or of no scaling at all: an older `type` alone
  // scales nothing. YaRN's `truncate` is looked for beside the two kinds of layers.
  nlohmann::json full = both.is_object() ? part("full_attention") : nlohmann::json{{"rope_type", "default"}};
  const auto scaling = config.find("rope_scaling");
  if (scaling != config.end() && scaling->is_object()) full.update(*scaling);
  full.erase("truncate");
  if (both.is_object() && both.contains("truncate")) full["truncate"] = both["truncate"];
  if (!full.empty()) config["rope_scaling"] = full;
  const nlohmann::json windowed = part("sliding_attention");
  if (windowed.contains("rope_theta")) config["rope_local_base_freq"] = windowed["rope_theta"];
  if (windowed.contains("rope_type")) config["rope_window_type"] = windowed["rope_type"];
}

void expect_plain_windows(const ConfigReader& reader) {
  if (reader.is_gguf()) return;
  const auto type = reader.hf().find("rope_window_type");
  if (type != reader.hf().end() && *type != "default")
    reader.fail("config.json: rope_parameters.sliding_attention.rope_type", type->dump(), "\"default\"");
}

void read_query_growth(const ConfigReader& reader, ModelConfig& config) {
  double scale = 0, every = 0;
  if (reader.is_gguf()) {
    scale = reader.real_or("attention.temperature_scale", "", 0);
    every = reader.real_or("rope.scaling.original_context_length", "", config.context_length);
  } else {
    const nlohmann::json& object = hf_rope_object(reader.hf());
    scale = reader.hf_real_or(object, "llama_4_scaling_beta", 0);
    every = reader.hf_real_or(object, "original_max_position_embeddings", config.context_length);
  }
  if (!(every >= 1)) reader.fail("original_max_position_embeddings", fmt::format("{}", every), "at least 1");
  config.own["growth"] = static_cast<float>(scale);
  config.own["growth_every"] = static_cast<float>(scale == 0 ? 1 : every);
}

void write_query_growth(GgufKeys& keys) {
  if (keys.config().own.at("growth") != 0)
    keys.real("attention.temperature_scale", keys.config().own.at("growth"));
}

QueryGrowth query_growth(const ModelConfig& config) {
  return {config.own.at("growth"), config.own.at("growth_every"), 0};
}

void write_rope(GgufKeys& keys) {
  const ModelConfig& config = keys.config();
  keys.real("rope.freq_base", config.rope_theta);
  double implied = 1;  // of the magnitude
  const Scaling s = read_hf_scaling(keys.reader(), config);
  if (!config.rope_as_tensor && (s.type == "yarn" || s.type == "linear")) {
    keys.text("rope.scaling.type", s.type);
    keys.real("rope.scaling.factor", s.factor);
    if (s.type == "yarn") {
      implied = yarn_magnitude(s.factor);
      const double all = keys.reader().hf_real_or(hf_rope_object(keys.reader().hf()), "mscale_all_dim", 0);
      // As llama.cpp's files have it: a tenth of it where scores are scaled, all of it in Mistral's.
      const bool scores = config.latent.rank > 0;
      if (all != 0 && (scores || config.own.contains("growth"))) {
        keys.real(kYarnLogKey, scores ? 0.1 * all : all);
        implied = scores ? 1.0 : implied / yarn_magnitude(s.factor, static_cast<float>(all));
      }
      keys.size("rope.scaling.original_context_length", static_cast<int64_t>(s.original_context));
      if (s.beta_fast != 32) keys.real("rope.scaling.yarn_beta_fast", s.beta_fast);
      if (s.beta_slow != 1) keys.real("rope.scaling.yarn_beta_slow", s.beta_slow);
    }
  }
  if (s.type == "longrope") {
    keys.text("rope.scaling.type", s.type);  // the factors are tensors
    keys.size("rope.scaling.original_context_length", static_cast<int64_t>(s.original_context));
  }
  if (static_cast<float>(implied) != config.rope_magnitude) {
    keys.real("rope.scaling.attn_factor", config.rope_magnitude / implied);
  }
}

}  // namespace millrace
