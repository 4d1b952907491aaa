// Falcon H1: every layer attends and has a state of Mamba-2, both of the same input, then a feed-forward
// layer; and many multipliers, which GGUF files have in their matrices already. TII 2025.
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/mamba_layer.h"
#include "model/rope.h"

namespace millrace {
namespace {

using S = StateLayerWeights;

constexpr const char* kFalconParts[5] = {"ssm_gate", "ssm_x", "ssm_b", "ssm_c", "ssm_dt"};

class FalconH1 final : public Architecture {
 public:
  std::string_view name() const override { return "falcon-h1"; }
  std::vector<std::string_view> model_types() const override { return {"falcon_h1"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024,
      "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
      "mamba_expand": 2, "mamba_norm_before_gate": true, "mamba_rms_norm": false, "lm_head_multiplier": 1.0,
      "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
      "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0})";
  }
  HfNames hf_names() const override { return {.output_norm = "model.final_layernorm.weight"}; }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    config.state_layers.assign(static_cast<size_t>(config.layers), true);
    config.state_beside = true;
    MambaFields fields;
    fields.inner = "mamba_d_ssm";
    read_mamba(reader, fields, /*hf_norm_groups=*/true, config);
    config.own["norm"] = reader.is_gguf() ? has_norm(reader) : reader.flag_or("", "mamba_rms_norm", false);
    config.own["norm_first"] =
        !reader.is_gguf() && config.own["norm"] != 0.0f && reader.flag_or("", "mamba_norm_before_gate", true);
    read_multipliers(reader, config);
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    for (const auto& [name, value] : c.own) {
      if (name.starts_with("norm") || name.starts_with("step_") || value == 1.0f) continue;
      throw_error(ErrorCode::kUnsupported,
                  "{}: multipliers: found {} for {}, expected 1 to write a GGUF file, which has none",
                  keys.reader().checkpoint().path(), value, name);
    }
    if (c.embedding_scale != 1.0f || c.logit_scale != 1.0f)
      throw_error(
          ErrorCode::kUnsupported,
          "{}: multipliers: found {} for embeddings and {} for logits, expected 1 to write a GGUF file",
          keys.reader().checkpoint().path(), c.embedding_scale, c.logit_scale);
    if (c.own.at("norm") != 0.0f && c.own.at("norm_first") != 0.0f)
      throw_error(ErrorCode::kUnsupported,
                  "{}: mamba_norm_before_gate: found true, expected false to write a GGUF file",
                  keys.reader().checkpoint().path());
    write_sizes(keys, c.ffn);
    write_norm(keys);
    write_rope(keys);
    write_mamba(keys);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, c, {});
    MambaNames names = kMambaNames;
    names.before = {};
    if (c.own.at("norm") == 0.0f) names.norm = {};
    add_mamba(weights, c, names);
    weights.push_back(
        norm_weight("ffn_norm.weight", "pre_ff_layernorm.weight", c.hidden, &LayerWeights::ffn_norm));
    weights.back().gguf = {"ffn_norm"};  // llama.cpp's files leave .weight out
    // Gate and up see the same input: what scales the gate's scales the norm, and is taken from up's behind
    // it.
    weights.back().hf_scale = c.own.at("mlp_gate");
    add_feed_forward(weights, c,
                     {.gate = "feed_forward.gate_proj.weight",
                      .up = "feed_forward.up_proj.weight",
                      .down = "feed_forward.down_proj.weight"});
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<S>(); }

  void layer(Executor& x, const LayerWeights& weights, const ModelConfig& config, int index) const override {
    const auto& w = static_cast<const S&>(weights);
    std::array<float, 5> scales{};
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = config.own.at(kFalconParts[i]);
    // Both read the residual stream before either adds to it.
    x.norm_qkv(qkv_of(w, config));
    x.norm_mix(mamba_inputs(w, config, scales));
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));
    Projection attended = project_of(w, config);
    attended.scale = config.own.at("attention");
    x.project_add(attended);
    StateMix mix = mamba_mix(w, config, index);
    mix.norm_before_gate = config.own.at("norm_first") != 0.0f;
    x.mix(mix);
    x.project_add({.linear = {w.ssm_out.get(), w.ssm_out_bias.get()}, .scale = config.own.at("ssm_out")});
    Ffn ffn = ffn_of(w, config);
    ffn.scale = config.own.at("mlp_down") / config.own.at("mlp_gate");
    x.ffn_add(ffn);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"falcon-h1-0.5b", R"({"model_type": "falcon_h1", "num_hidden_layers": 36, "hidden_size": 1024,
      "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
      "vocab_size": 32784, "max_position_embeddings": 16384, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
      "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "rope_theta": 99999997952.0,
      "tie_word_embeddings": true})"},
            {"tiny-falcon-h1", R"({"model_type": "falcon_h1", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "mamba_d_ssm": 96, "mamba_n_heads": 3,
      "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "tie_word_embeddings": true})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 private:
  static bool has_norm(const ConfigReader& reader) {
    return reader.checkpoint().find_tensor("blk.0.ssm_norm.weight") != nullptr;
  }

  // config.json: so many numbers under a name, or ones.
  static std::vector<float> list_of(const ConfigReader& reader, const char* field, size_t count) {
    std::vector<float> values(count, 1.0f);
    if (reader.is_gguf()) return values;
    const auto found = reader.hf().find(field);
    if (found == reader.hf().end() || found->is_null()) return values;
    if (!found->is_array() || found->size() != count)
      reader.fail(fmt::format("config.json: {}", field), found->dump(), fmt::format("{} numbers", count));
    for (size_t i = 0; i < count; ++i) {
      if (!(*found)[i].is_number() || (*found)[i].get<double>() == 0.0)
        reader.fail(fmt::format("config.json: {}", field), found->dump(), "numbers other than 0");
      values[i] = (*found)[i].get<float>();
    }
    return values;
  }

  // What multiplies an input of a matrix multiplies its output: scores have those of queries and keys, what
  // is attended to that of values. A bias would have to be divided by them.
  static void read_multipliers(const ConfigReader& reader, ModelConfig& config) {
    const auto one = [&](const char* field) { return reader.real_or("", field, 1.0); };
    const double in = one("attention_in_multiplier"), ssm_in = one("ssm_in_multiplier");
    const double usual = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
    config.attention_scale = static_cast<float>(usual * in * in * one("key_multiplier"));
    config.own["attention"] = static_cast<float>(in * one("attention_out_multiplier"));
    config.own["ssm_out"] = static_cast<float>(one("ssm_out_multiplier"));
    const std::vector<float> parts = list_of(reader, "ssm_multipliers", 5);
    for (size_t i = 0; i < 5; ++i) config.own[kFalconParts[i]] = static_cast<float>(ssm_in * parts[i]);
    const std::vector<float> mlp = list_of(reader, "mlp_multipliers", 2);
    config.own["mlp_gate"] = mlp[0];
    config.own["mlp_down"] = mlp[1];
    config.embedding_scale = static_cast<float>(one("embedding_multiplier"));
    config.logit_scale = static_cast<float>(one("lm_head_multiplier"));
    for (const char* field : {"attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias"}) {
      if (!reader.is_gguf() && reader.flag_or("", field, false))
        throw_error(ErrorCode::kUnsupported, "{}: config.json: {}: found true, expected false",
                    reader.checkpoint().path(), field);
    }
  }
};

const FalconH1 kFalconH1Object{};

}  // namespace

const Architecture& kFalconH1 = kFalconH1Object;

}  // namespace millrace
