// Qwen 2 and 2.5: a Llama with biases on q, k and v. Yang et al. 2024.
#include "model/decoder_config.h"
#include "model/decoder_weights.h"
#include "model/dense_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen2 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "qwen2"; }
  std::vector<std::string_view> model_types() const override { return {"qwen2"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
      "max_window_layers": 28})";
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.config().ffn);
    write_norm(keys);
    write_rope(keys);
    write_windows(keys, [](int32_t) { return false; });
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qkv_biases = Presence::kUsual});
    weights.push_back(ffn_norm_weight(config));
    add_feed_forward(weights, config);
    return weights;
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen2.5-7b", R"({"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584,
      "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
      "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": false})"},
            {"tiny-qwen2", R"({"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": true})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }

 protected:
  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    read_qwen_windows(reader, config);
  }
};

const Qwen2 kQwen2Object{};

}  // namespace

const Architecture& kQwen2 = kQwen2Object;

}  // namespace millrace
