// Gemma 3, text: five layers with a window for each without, each kind with rotary angles of its own; every
// query and key head is normalized. Gemma Team 2025.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/gemma.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Gemma3 final : public Gemma {
 public:
  std::string_view name() const override { return "gemma3"; }
  std::vector<std::string_view> model_types() const override { return {"gemma3_text", "gemma3"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
      "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
      "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0})";
  }

  void settle_hf(nlohmann::json& config) const override { settle_rope_of_layers(config); }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    Gemma::read_config(reader, config);
    // Of a model that sees, transformers' class caps no logits, whatever its text_config says.
    if (!reader.is_gguf() && reader.checkpoint().hf->nested) config.logit_softcap = 0.0f;
    const double theta = reader.real_or("rope.freq_base_swa", "rope_local_base_freq", 10000.0);
    if (!(theta > 1)) reader.fail("rope theta of layers with a window", fmt::format("{}", theta), "above 1");
    expect_plain_windows(reader);
    config.rope_window_inv_freq = plain_angles(theta, config.rotary_dims);
  }

  std::optional<ImageText> image_text() const override {
    return ImageText{.token = "<start_of_image>",
                     .written = "<start_of_image>",
                     .expanded = "\n\n<start_of_image><end_of_image>\n\n",
                     .projector = "gemma3"};
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"gemma3-27b", R"({"model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
      "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
      "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024,
      "query_pre_attn_scalar": 168, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      "tie_word_embeddings": true})"},
            {"gemma3-270m", R"({"model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640,
      "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
      "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512,
      "query_pre_attn_scalar": 256, "tie_word_embeddings": true})"},
            {"tiny-gemma3", R"({"model_type": "gemma3_text", "num_hidden_layers": 3, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "sliding_window": 32, "sliding_window_pattern": 2,
      "query_pre_attn_scalar": 24, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      "tie_word_embeddings": true})"}};
  }

 protected:
  void write_own(GgufKeys& keys) const override {
    Gemma::write_own(keys);
    keys.real("rope.freq_base_swa", keys.reader().real_or("", "rope_local_base_freq", 10000.0));
  }
  int32_t full_every() const override { return 6; }
  int32_t layers_of_27b() const override { return 62; }
  bool qk_norm() const override { return true; }
  bool attention_softcap() const override { return false; }  // read by the class, used by none of its layers
};

const Gemma3 kGemma3Object{};

}  // namespace

const Architecture& kGemma3 = kGemma3Object;

}  // namespace millrace
