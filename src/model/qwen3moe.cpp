// Qwen 3, mixture of experts: Qwen 3's attention; each token goes to the k experts of largest router
// probability.
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/mixture_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen3Moe final : public MixtureDecoder {
 public:
  std::string_view name() const override { return "qwen3moe"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_moe"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32,
      "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
      "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_local_experts", "num_experts"}};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    read_expert_sizes(reader, config, "num_experts");
    // llama.cpp's files have no such key, and their experts' weights add up to one.
    const bool renormalize = reader.flag_or("expert_weights_norm", "norm_topk_prob", reader.is_gguf());
    config.expert_weighting =
        renormalize ? Route::Weighting::kSoftmaxAllRenormalized : Route::Weighting::kSoftmaxAll;
    read_qwen_expert_layers(reader, config);
    if (reader.is_gguf()) {
      read_gguf_windows(reader, config, [](int32_t) { return false; });
    } else if (reader.flag_or("", "use_sliding_window", false)) {
      config.layer_windows.assign(config.layers, hf_window(reader));  // unlike the dense Qwen 3: every layer
    }
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20));  // of dense layers
    write_norm(keys);
    write_rope(keys);
    write_experts(keys);
    if (keys.config().expert_weighting == Route::Weighting::kSoftmaxAll)
      keys.flag("expert_weights_norm", false);
    write_windows(keys, [](int32_t) { return false; });
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen3-30b-a3b", R"({"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
      "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
      "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": true,
      "tie_word_embeddings": false})"},
            {"tiny-qwen3moe", R"({"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": true,
      "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }

 protected:
  AttentionWeights attention_weights(const ModelConfig&) const override { return {.qk_norm = true}; }
};

const Qwen3Moe kQwen3MoeObject{};

}  // namespace

const Architecture& kQwen3Moe = kQwen3MoeObject;

}  // namespace millrace
