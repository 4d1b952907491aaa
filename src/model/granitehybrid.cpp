// Granite 4, the hybrids: layers of Mamba-2 and a few of attention without positions, Granite's multipliers,
// one feed-forward layer in each, to the larger ones a shared expert beside others. IBM 2025, Dao and Gu
// 2024.
#include <fmt/core.h>

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

class GraniteHybrid final : public Architecture {
 public:
  std::string_view name() const override { return "granitehybrid"; }
  std::vector<std::string_view> model_types() const override { return {"granitemoehybrid"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
      "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
      "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
      "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": true,
      "mamba_proj_bias": false})";
  }
  // Published files name the kinds of layers otherwise than transformers does now.
  void settle_hf(nlohmann::json& config) const override {
    if (config.contains("layers_block_type") && !config.contains("layer_types"))
      config["layer_types"] = config["layers_block_type"];
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_sizes_of(reader, config);
    expect_silu(reader);
    config.experts = reader.integer_or("expert_count", "num_local_experts", 0, 4096, 0);
    if (config.experts == 0) {
      config.ffn = reader.integer("feed_forward_length", "shared_intermediate_size", 1, 1 << 20);
    } else {
      config.experts_per_token =
          reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
      config.expert_ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
      config.shared_ffn =
          reader.integer("expert_shared_feed_forward_length", "shared_intermediate_size", 1, 1 << 20);
    }
    read_mamba(reader, {}, /*hf_norm_groups=*/false, config);
    read_multipliers(reader, config);
    config.rope_interleaved = reader.is_gguf();
    read_rope(reader, config);
    if (!has_rope(reader)) config.unrotated_layers.assign(static_cast<size_t>(config.layers), true);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    keys.size("feed_forward_length", c.experts > 0 ? c.expert_ffn : c.ffn);
    if (c.experts > 0) {
      keys.size("expert_count", c.experts);
      keys.size("expert_used_count", c.experts_per_token);
      keys.size("expert_shared_feed_forward_length", c.shared_ffn);
    }
    keys.size("attention.head_count", c.heads);
    keys.size("attention.key_length", c.head_dim);
    keys.size("attention.value_length", c.head_dim);
    keys.size("vocab_size", c.vocab);
    write_attending_layers(keys);
    keys.size("rope.dimension_count", c.rotary_dims);
    keys.flag("rope.scaling.finetuned", has_rope(keys.reader()));
    write_norm(keys);
    write_rope(keys);
    write_mamba(keys);
    keys.real("embedding_scale", c.embedding_scale);
    keys.real("residual_scale", c.residual_scale);
    keys.real("logit_scale", keys.reader().real_or("", "logits_scaling", 1.0));
    keys.real("attention.scale", c.attention_scale);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int layer) const override {
    std::vector<WeightSpec> weights;
    if (c.has_state(layer)) {
      add_mamba(weights, c, kMambaNames);
    } else {
      add_attention(weights, c, {.interleaved_in_gguf = true});
    }
    weights.push_back(ffn_norm_weight(c));
    constexpr FeedForwardNames kShared = {.gate = "shared_mlp.gate_linear.weight",
                                          .up = "shared_mlp.up_linear.weight",
                                          .down = "shared_mlp.output_linear.weight"};
    const int64_t inner = c.experts > 0 ? c.shared_ffn : c.ffn;
    if (c.experts > 0) {
      constexpr std::string_view kBoth = "block_sparse_moe.input_linear.weight";
      add_experts(weights, c,
                  {.router_weight = "block_sparse_moe.router.layer.weight",
                   .router_bias = "",
                   .gate = {.stacked = kBoth, .parts = 2},
                   .up = {.first_row = c.expert_ffn, .stacked = kBoth, .parts = 2},
                   .down = {.stacked = "block_sparse_moe.output_linear.weight"}});
      add_shared_expert(weights, c, kShared);
    } else {
      add_feed_forward(weights, c, kShared);
    }
    for (WeightSpec& spec : weights) {
      constexpr std::string_view kBoth = "shared_mlp.input_linear.weight";
      if (spec.role == "ffn_gate.weight" || spec.role == "ffn_gate_shexp.weight")
        spec.part_of = PartOf{.hf = kBoth, .first_row = 0, .all_rows = 2 * inner};
      if (spec.role == "ffn_up.weight" || spec.role == "ffn_up_shexp.weight")
        spec.part_of = PartOf{.hf = kBoth, .first_row = inner, .all_rows = 2 * inner};
    }
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<S>(); }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    if (config.has_state(index)) {
      mamba_layer(x, static_cast<const S&>(w), config, index);
    } else {
      x.norm_qkv(qkv_of(w, config));
      x.rope_append_kv(rope_of(config, index));
      x.attend(attend_of(w, config, index));
      x.project_add(project_of(w, config));
    }
    if (config.experts == 0) return x.ffn_add(ffn_of(w, config));
    // What experts give is scaled by way of their weights.
    Route route = route_of(w, config);
    route.scale = config.residual_scale;
    x.route(route);
    Experts experts = experts_of(w, config);
    experts.shared.scale = config.residual_scale;
    x.experts_add(experts);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"granite4-h-micro",
             R"({"model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 2048,
      "shared_intermediate_size": 8192, "num_local_experts": 0, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 100352, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
      "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
      "attention_multiplier": 0.015625, "mamba_n_heads": 64, "mamba_d_state": 128, "mamba_d_head": 64,
      "position_embedding_type": "nope", "tie_word_embeddings": true, "layer_types": ["mamba", "mamba", "mamba",
      "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
      "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
      "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention",
      "mamba", "mamba", "mamba", "mamba"]})"},
            {"granite4-h-small",
             R"({"model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 4096,
      "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72,
      "num_experts_per_tok": 10, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352,
      "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0,
      "logits_scaling": 16.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
      "mamba_n_heads": 128, "mamba_d_state": 128, "mamba_d_head": 64, "position_embedding_type": "nope",
      "tie_word_embeddings": true, "layer_types": ["mamba", "mamba", "mamba", "mamba", "mamba", "attention",
      "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba",
      "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba",
      "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba",
      "mamba"]})"},
            {"tiny-granitehybrid-moe",
             R"({"model_type": "granitemoehybrid", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 32, "shared_intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 3,
      "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048,
      "rms_norm_eps": 1e-5, "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.3,
      "attention_multiplier": 0.125, "mamba_n_heads": 4, "mamba_d_state": 32, "mamba_d_head": 32,
      "position_embedding_type": "nope", "tie_word_embeddings": true, "layer_types": ["mamba", "attention"]})"},
            {"tiny-granitehybrid",
             R"({"model_type": "granitemoehybrid", "num_hidden_layers": 3, "hidden_size": 64,
      "shared_intermediate_size": 128, "num_local_experts": 0, "num_attention_heads": 4,
      "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
      "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.3,
      "attention_multiplier": 0.125, "mamba_n_heads": 4, "mamba_d_state": 32, "mamba_d_head": 32,
      "position_embedding_type": "nope", "tie_word_embeddings": true,
      "layer_types": ["mamba", "attention", "mamba"]})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 private:
  static bool has_rope(const ConfigReader& reader) {
    if (reader.is_gguf()) return reader.flag_or("rope.scaling.finetuned", "", true);
    const auto type = reader.hf().find("position_embedding_type");
    return type != reader.hf().end() && *type == "rope";
  }

  static void read_sizes_of(const ConfigReader& reader, ModelConfig& config) {
    read_outer_sizes(reader, config);
    read_norm_eps(reader, config, "rms_norm_eps");
    if (reader.is_gguf()) {
      for (const bool attends : read_attending_layers(reader, config))
        config.state_layers.push_back(!attends);
    } else {
      config.kv_heads = reader.integer_or("", "num_key_value_heads", 1, 1024, config.heads);
      read_hf_layers(reader, config);
    }
    if (config.kv_heads == 0) config.kv_heads = config.heads;
    config.head_dim =
        reader.integer_or("attention.key_length", "head_dim", 1, 1024, config.hidden / config.heads);
    check_heads(reader, config);
  }

  static void read_hf_layers(const ConfigReader& reader, ModelConfig& config) {
    if (!read_hf_state_layers(reader, config, {"mamba", "linear_attention"}, {"attention", "full_attention"},
                              "mamba or attention"))
      config.state_layers.assign(static_cast<size_t>(config.layers), true);
  }
};

const GraniteHybrid kGraniteHybridObject{};

}  // namespace

const Architecture& kGraniteHybrid = kGraniteHybridObject;

}  // namespace millrace
