// Gemma 2: every other layer with a window; attention scores and logits through a soft cap. Gemma Team 2024.
#include "io/hf_directory.h"
#include "model/gemma.h"

namespace millrace {
namespace {

class Gemma2 final : public Gemma {
 public:
  std::string_view name() const override { return "gemma2"; }
  std::vector<std::string_view> model_types() const override { return {"gemma2"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
      "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
      "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0})";
  }

  void settle_hf(nlohmann::json& config) const override {
    config.erase("sliding_window_pattern");
  }  // not read

  std::vector<SyntheticPreset> presets() const override {
    return {{"gemma2-2b", R"({"model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304,
      "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
      "vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": true})"},
            {"tiny-gemma2", R"({"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "sliding_window": 32, "query_pre_attn_scalar": 24,
      "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "tie_word_embeddings": true})"}};
  }

 protected:
  int32_t full_every() const override { return 2; }
  int32_t layers_of_27b() const override { return 46; }
  int32_t gguf_window() const override { return 4096; }  // what older files mean
  bool qk_norm() const override { return false; }
  bool attention_softcap() const override { return true; }
};

const Gemma2 kGemma2Object{};

}  // namespace

const Architecture& kGemma2 = kGemma2Object;

}  // namespace millrace
