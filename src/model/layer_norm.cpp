#include "model/layer_norm.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_weights.h"

namespace millrace {

void read_layer_norm(const ConfigReader& reader, ModelConfig& config, std::string_view hf) {
  config.norm_kind = Norm::Kind::kLayer;
  config.norm_eps = static_cast<float>(reader.real_or("attention.layer_norm_epsilon", hf, 1e-5));
  if (!(config.norm_eps > 0))
    reader.fail("layer norm epsilon", fmt::format("{}", config.norm_eps), "above 0");
}

void write_layer_norm(GgufKeys& keys) { keys.real("attention.layer_norm_epsilon", keys.config().norm_eps); }

void read_activation(const ConfigReader& reader, ModelConfig& config, std::string_view hf,
                     Activation in_gguf) {
  config.ffn_activation = in_gguf;
  if (reader.is_gguf()) return;
  const auto found = reader.hf().find(hf);
  if (found == reader.hf().end()) return;
  const std::string name = found->is_string() ? found->get<std::string>() : "";
  if (name == "gelu" || name == "gelu_python") {
    config.ffn_activation = Activation::kGelu;
  } else if (name == "gelu_new" || name == "gelu_fast" || name == "gelu_pytorch_tanh" ||
             name == "gelu_accurate") {
    config.ffn_activation = Activation::kGeluTanh;
  } else if (name == "silu" || name == "swish") {
    config.ffn_activation = Activation::kSilu;
  } else {
    throw_error(ErrorCode::kUnsupported,
                "{}: config.json: {}: found {}, expected gelu, gelu_new, gelu_pytorch_tanh or silu",
                reader.checkpoint().path(), hf, found->dump());
  }
}

void read_attention_scale(const ConfigReader& reader, ModelConfig& config) {
  if (reader.is_gguf()) config.attention_scale = static_cast<float>(reader.real_or("attention.scale", "", 0));
}

void write_attention_scale(GgufKeys& keys) {
  if (keys.config().attention_scale != 0.0f) keys.real("attention.scale", keys.config().attention_scale);
}

void add_layer_norm(std::vector<WeightSpec>& to, const NormNames& names, int64_t size, WeightMember weight,
                    WeightMember bias, Presence biases) {
  to.push_back(norm_weight(names.weight, names.hf_weight, size, weight));
  to.push_back(bias_weight(names.bias, names.hf_bias, {size}, bias, biases));
}

WeightSpec part_of(WeightSpec spec, const PartOf& part, bool hf_transposed) {
  spec.part_of = part;
  spec.hf_transposed = hf_transposed;
  return spec;
}

WeightSpec outer_table(std::string_view role, std::string_view hf, int64_t rows, int64_t cols,
                       OuterMember to) {
  constexpr double kSpread = 0.1;  // less than the tokens' own
  return {.role = role,
          .hf = hf,
          .shape = {rows, cols},
          .use = WeightUse::kLookup,
          .spread = kSpread,
          .outer = to};
}

WeightSpec outer_vector(std::string_view role, std::string_view hf, int64_t size, OuterMember to,
                        Presence presence, double spread) {
  return {.role = role, .hf = hf, .shape = {size}, .presence = presence, .spread = spread, .outer = to};
}

}  // namespace millrace
