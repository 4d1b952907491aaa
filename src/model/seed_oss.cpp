// Seed-OSS: llama with biases on q, k and v. ByteDance Seed Team 2025.
#include "model/decoder_weights.h"
#include "model/dense_decoder.h"

namespace millrace {
namespace {

class SeedOss final : public DenseDecoder {
 public:
  std::string_view name() const override { return "seed_oss"; }
  std::vector<std::string_view> model_types() const override { return {"seed_oss"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
      "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6})";
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qkv_biases = Presence::kUsual});
    // GGUF files call the norm before the feed-forward layer what Hugging Face calls it.
    weights.push_back(norm_weight("post_attention_norm.weight", "post_attention_layernorm.weight",
                                  config.hidden, &LayerWeights::ffn_norm));
    add_feed_forward(weights, config);
    return weights;
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"seed-oss-36b", R"({"model_type": "seed_oss", "num_hidden_layers": 64, "hidden_size": 5120,
      "intermediate_size": 27648, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 155136, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
      "tie_word_embeddings": false})"},
            {"tiny-seed-oss", R"({"model_type": "seed_oss", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
      "tie_word_embeddings": false})"}};
  }
};

const SeedOss kSeedOssObject{};

}  // namespace

const Architecture& kSeedOss = kSeedOssObject;

}  // namespace millrace
