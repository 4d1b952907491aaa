#include "model/gemma.h"

#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_weights.h"

namespace millrace {
namespace {

// 1 / sqrt(query_pre_attn_scalar), as llama.cpp knows it by the model's size.
double implied_scale(const ModelConfig& config, int32_t layers_of_27b) {
  return 1.0 / std::sqrt(config.layers == layers_of_27b ? config.hidden / config.heads : config.head_dim);
}

SlidingRule all_but_every(int32_t number) {
  return [number](int32_t layer) { return (layer + 1) % number != 0; };
}

}  // namespace

void Gemma::read_config(const ConfigReader& reader, ModelConfig& config) const {
  config.ffn_activation = Activation::kGeluTanh;
  if (!reader.is_gguf()) {
    const nlohmann::json& hf = reader.hf();
    if (hf.at("hidden_activation") != "gelu_pytorch_tanh")
      reader.fail("config.json: hidden_activation", hf.at("hidden_activation").dump(),
                  "\"gelu_pytorch_tanh\"");
    if (reader.flag_or("", "use_bidirectional_attention", false))
      reader.fail("config.json: use_bidirectional_attention", "true", "false");
  }
  DenseDecoder::read_config(reader, config);
}

void Gemma::read_own(const ConfigReader& reader, ModelConfig& config) const {
  config.embedding_scale = std::sqrt(static_cast<float>(config.hidden));
  if (reader.is_gguf()) {
    const double implied = implied_scale(config, layers_of_27b());
    config.attention_scale = static_cast<float>(reader.real_or("attention.scale", "", implied));
    read_gguf_windows(reader, config, all_but_every(full_every()), gguf_window());
  } else {
    const double scalar = reader.real_or("", "query_pre_attn_scalar", config.head_dim);
    if (!(scalar > 0))
      reader.fail("config.json: query_pre_attn_scalar", fmt::format("{}", scalar), "above 0");
    config.attention_scale = static_cast<float>(1.0 / std::sqrt(scalar));
    const int32_t every = reader.integer_or("", "sliding_window_pattern", 1, 1 << 20, full_every());
    read_hf_windows(reader, config, hf_window(reader), all_but_every(every));
  }
  // Absent from config.json, the class's default is there, and null means none; llama.cpp assumes the same.
  const bool assumed = reader.is_gguf() && attention_softcap();
  if (attention_softcap()) {
    config.attention_softcap = static_cast<float>(
        reader.real_or("attn_logit_softcapping", "attn_logit_softcapping", assumed ? 50.0 : 0.0));
  }
  config.logit_softcap = static_cast<float>(
      reader.real_or("final_logit_softcapping", "final_logit_softcapping", assumed ? 30.0 : 0.0));
}

void Gemma::write_own(GgufKeys& keys) const {
  const ModelConfig& config = keys.config();
  write_windows(keys, all_but_every(full_every()));
  if (config.attention_scale != static_cast<float>(implied_scale(config, layers_of_27b())))
    keys.real("attention.scale", config.attention_scale);
  if (attention_softcap()) keys.real("attn_logit_softcapping", config.attention_softcap);
  if (attention_softcap() || config.logit_softcap != 0.0f)
    keys.real("final_logit_softcapping", config.logit_softcap);
}

std::vector<WeightSpec> Gemma::layer_weights(const ModelConfig& config, int) const {
  using W = LayerWeights;
  std::vector<WeightSpec> weights;
  add_attention(weights, config, {.qk_norm = qk_norm()});
  weights.push_back(norm_weight("post_attention_norm.weight", "post_attention_layernorm.weight",
                                config.hidden, &W::attn_post_norm));
  weights.push_back(
      norm_weight("ffn_norm.weight", "pre_feedforward_layernorm.weight", config.hidden, &W::ffn_norm));
  add_feed_forward(weights, config);
  weights.push_back(norm_weight("post_ffw_norm.weight", "post_feedforward_layernorm.weight", config.hidden,
                                &W::ffn_post_norm));
  for (WeightSpec& spec : weights) {
    if (spec.role.ends_with("norm.weight")) spec.hf_offset = 1.0f;
  }
  return weights;
}

}  // namespace millrace
