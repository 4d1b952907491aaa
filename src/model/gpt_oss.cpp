// gpt-oss: alternating window and full attention with learned sinks, YaRN, biases everywhere, and experts in
// MXFP4 with a clamped SwiGLU. OpenAI 2025.
#include <fmt/core.h>

#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

class GptOss final : public Architecture {
 public:
  std::string_view name() const override { return "gpt-oss"; }
  std::vector<std::string_view> model_types() const override { return {"gpt_oss"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
      "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0,
      "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
      "truncate": false, "original_max_position_embeddings": 4096}})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_experts", "num_local_experts"}};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    read_expert_sizes(reader, config, "num_local_experts", "intermediate_size");
    config.expert_weighting = Route::Weighting::kSoftmaxChosen;
    config.expert_activation = Activation::kClampedSwiglu;
    config.swiglu_alpha = static_cast<float>(reader.real_or("", "swiglu_alpha", 1.702));
    config.swiglu_limit = static_cast<float>(reader.real_or("", "swiglu_limit", 7.0));
    if (reader.is_gguf()) {
      read_gguf_windows(reader, config, slides);
    } else {
      read_hf_windows(reader, config, hf_window(reader), slides);
    }
    read_rope(reader, config, /*truncate_yarn_range=*/false);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& config = keys.config();
    write_sizes(keys, config.expert_ffn);
    write_norm(keys);
    write_rope(keys);
    keys.size("expert_count", config.experts);
    keys.size("expert_used_count", config.experts_per_token);
    keys.size("expert_feed_forward_length", config.expert_ffn);
    write_windows(keys, slides);
  }

  // Gate and up are alternate rows of one tensor.
  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qkv_biases = Presence::kUsual, .output_bias = Presence::kUsual});
    weights.push_back({.role = "attn_sinks.weight",
                       .hf = "self_attn.sinks",
                       .shape = {config.heads},
                       .to = &LayerWeights::attn_sinks,
                       .spread = 1.0,
                       .gguf = {"attn_sinks.weight", "attn_sinks"}});
    weights.push_back(ffn_norm_weight(config));
    weights.back().gguf = {"post_attention_norm.weight"};
    add_experts(weights, config,
                {.router_weight = "mlp.router.weight",
                 .router_bias = "mlp.router.bias",
                 .gate = {.fused = "gate_up_proj", .first_row = 0, .row_step = 2},
                 .up = {.fused = "gate_up_proj", .first_row = 1, .row_step = 2},
                 .down = {.fused = "down_proj"},
                 .biases = Presence::kUsual});
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));  // window on even layers; sinks on all
    x.project_add(project_of(w, config));
    x.route(route_of(w, config));
    x.experts_add(experts_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"gpt-oss-20b", R"({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
      "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
      "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": false, "original_max_position_embeddings": 4096}})"},
            {"gpt-oss-120b", R"({"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128,
      "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
      "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": false, "original_max_position_embeddings": 4096}})"},
            {"tiny-gpt-oss", R"({"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640, "max_position_embeddings": 2048,
      "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": false, "original_max_position_embeddings": 64}})"}};
  }

  // Harmony's special tokens: at their published ids in a vocabulary of the published size, else at its end.
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    constexpr int32_t kPublishedVocab = 201088, kFirst = 199998, kNamed = 15;
    const int32_t first = vocab == kPublishedVocab ? kFirst : vocab - kNamed;
    SyntheticTokenizer tokenizer{.pre = "gpt-4o",
                                 .specials = {},
                                 .bos = first,
                                 .eos = first + 4,
                                 .pad = first + 1,
                                 .chat_template = {}};
    for (int32_t id = first; id < vocab; ++id)
      tokenizer.specials[id] = fmt::format("<|reserved_{}|>", id - first + kFirst);
    tokenizer.specials[first] = "<|startoftext|>";
    tokenizer.specials[first + 1] = "<|endoftext|>";
    tokenizer.specials[first + 4] = "<|return|>";
    tokenizer.specials[first + 5] = "<|constrain|>";
    tokenizer.specials[first + 7] = "<|channel|>";
    tokenizer.specials[first + 8] = "<|start|>";
    tokenizer.specials[first + 9] = "<|end|>";
    tokenizer.specials[first + 10] = "<|message|>";
    tokenizer.specials[first + 14] = "<|call|>";
    // Not the models' own template, which is long: the same turns, plainly.
    tokenizer.chat_template =
        "{% for message in messages %}<|start|>{{ message['role'] }}<|message|>{{ message['content'] "
        "}}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
    return tokenizer;
  }
  std::optional<DType> expert_type() const override { return DType::kMXFP4; }

 private:
  static bool slides(int32_t layer) { return layer % 2 == 0; }
};

const GptOss kGptOssObject{};

}  // namespace

const Architecture& kGptOss = kGptOssObject;

}  // namespace millrace
