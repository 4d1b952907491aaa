// Granite 3: llama with multipliers on embeddings, attention scores, what a block adds, and logits. IBM 2024.
#include "model/decoder_config.h"
#include "model/dense_decoder.h"

namespace millrace {
namespace {

class Granite final : public DenseDecoder {
 public:
  std::string_view name() const override { return "granite"; }
  std::vector<std::string_view> model_types() const override { return {"granite"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
      "residual_multiplier": 1.0, "attention_multiplier": 1.0})";
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"granite-3.3-2b", R"({"model_type": "granite", "num_hidden_layers": 40, "hidden_size": 2048,
      "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49159,
      "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0,
      "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
      "attention_multiplier": 0.015625, "tie_word_embeddings": true})"},
            {"tiny-granite", R"({"model_type": "granite", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "embedding_multiplier": 6.0,
      "logits_scaling": 4.0, "residual_multiplier": 0.3, "attention_multiplier": 0.125,
      "tie_word_embeddings": true})"}};
  }

 protected:
  bool interleaved_in_gguf() const override { return true; }

  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    read_multipliers(reader, config);
    // Files that llama.cpp's converter makes of Granite 4 without states may know no positions.
    const bool rotated = !reader.is_gguf() || reader.flag_or("rope.scaling.finetuned", "", true);
    if (!rotated) config.unrotated_layers.assign(static_cast<size_t>(config.layers), true);
  }

  void write_own(GgufKeys& keys) const override {
    keys.real("embedding_scale", keys.config().embedding_scale);
    keys.real("residual_scale", keys.config().residual_scale);
    keys.real("logit_scale", keys.reader().real_or("", "logits_scaling", 1.0));
    keys.real("attention.scale", keys.config().attention_scale);
  }
};

const Granite kGraniteObject{};

}  // namespace

const Architecture& kGranite = kGraniteObject;

}  // namespace millrace
