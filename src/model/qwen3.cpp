// Qwen 3, dense: no biases; every query and key head is normalized before it is rotated. Yang et al. 2025.
#include "model/decoder_config.h"
#include "model/decoder_weights.h"
#include "model/dense_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen3 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "qwen3"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
      "sliding_window": 4096, "max_window_layers": 28})";
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.config().ffn);
    write_norm(keys);
    write_rope(keys);
    write_windows(keys, [](int32_t) { return false; });
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qk_norm = true});
    weights.push_back(ffn_norm_weight(config));
    add_feed_forward(weights, config);
    return weights;
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen3-0.6b", R"({"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
      "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
      "tie_word_embeddings": true})"},
            {"qwen3-8b", R"({"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
      "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
      "tie_word_embeddings": false})"},
            {"tiny-qwen3", R"({"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
      "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }

 protected:
  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    read_qwen_windows(reader, config);
  }
};

const Qwen3 kQwen3Object{};

}  // namespace

const Architecture& kQwen3 = kQwen3Object;

}  // namespace millrace
