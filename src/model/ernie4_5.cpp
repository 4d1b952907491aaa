// ERNIE 4.5, dense: llama whose rotated pairs are neighbours in every file. Baidu 2025.
#include "model/dense_decoder.h"

namespace millrace {
namespace {

class Ernie45 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "ernie4_5"; }
  std::vector<std::string_view> model_types() const override { return {"ernie4_5"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
      "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
      "rope_theta": 500000.0})";
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"ernie-4.5-0.3b", R"({"model_type": "ernie4_5", "num_hidden_layers": 18, "hidden_size": 1024,
      "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
      "vocab_size": 103424, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
      "tie_word_embeddings": true})"},
            {"tiny-ernie4.5", R"({"model_type": "ernie4_5", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
      "tie_word_embeddings": true})"}};
  }

 protected:
  void read_own(const ConfigReader&, ModelConfig& config) const override { config.rope_interleaved = true; }
};

const Ernie45 kErnie45Object{};

}  // namespace

const Architecture& kErnie45 = kErnie45Object;

}  // namespace millrace
