// Qwen 1.5 and 2, mixture of experts: Qwen 2's attention; each token goes to the k experts of largest router
// probability and to one more, whose part a sigmoid of its own decides. Qwen Team 2024.
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/mixture_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen2Moe final : public MixtureDecoder {
 public:
  std::string_view name() const override { return "qwen2moe"; }
  std::vector<std::string_view> model_types() const override { return {"qwen2_moe"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
      "num_key_value_heads": 16, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
      "max_window_layers": 28, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
      "num_experts_per_tok": 4, "num_experts": 60})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    const int32_t ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    config.experts = reader.integer("expert_count", "num_experts", 1, 4096);
    config.experts_per_token = reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
    // Older GGUF files leave both sizes to the dense one.
    config.expert_ffn = reader.integer_or("expert_feed_forward_length", "moe_intermediate_size", 1, 1 << 20,
                                          ffn / config.experts_per_token);
    config.shared_ffn = reader.integer_or("expert_shared_feed_forward_length",
                                          "shared_expert_intermediate_size", 1, 1 << 20, ffn);
    config.expert_weighting = reader.flag_or("expert_weights_norm", "norm_topk_prob", false)
                                  ? Route::Weighting::kSoftmaxAllRenormalized
                                  : Route::Weighting::kSoftmaxAll;
    read_qwen_expert_layers(reader, config);
    if (reader.is_gguf()) {
      read_gguf_windows(reader, config, [](int32_t) { return false; });
    } else {  // unlike the dense Qwen 2: every second layer before max_window_layers
      const int32_t window = reader.flag_or("", "use_sliding_window", false) ? hf_window(reader) : 0;
      const int32_t end = reader.integer_or("", "max_window_layers", 0, 1 << 20, 0);
      read_hf_windows(reader, config, window, [end](int32_t l) { return l % 2 == 0 && l < end; });
    }
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20));  // of dense layers
    write_norm(keys);
    write_rope(keys);
    write_experts(keys);
    keys.size("expert_shared_feed_forward_length", keys.config().shared_ffn);
    if (keys.config().expert_weighting == Route::Weighting::kSoftmaxAllRenormalized)
      keys.flag("expert_weights_norm", true);
    write_windows(keys, [](int32_t) { return false; });
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen1.5-moe-a2.7b", R"({"model_type": "qwen2_moe", "num_hidden_layers": 24, "num_experts": 60,
      "num_experts_per_tok": 4, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
      "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
      "vocab_size": 151936, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
      "norm_topk_prob": false, "tie_word_embeddings": false})"},
            {"tiny-qwen2moe", R"({"model_type": "qwen2_moe", "num_hidden_layers": 2, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "shared_expert_intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": false,
      "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }

 protected:
  AttentionWeights attention_weights(const ModelConfig&) const override {
    return {.qkv_biases = Presence::kUsual};
  }
  void add_beside_experts(std::vector<WeightSpec>& to, const ModelConfig& config) const override {
    add_mixed_shared_expert(to, config);
  }
};

const Qwen2Moe kQwen2MoeObject{};

}  // namespace

const Architecture& kQwen2Moe = kQwen2MoeObject;

}  // namespace millrace
