// OLMo 2 and 3: norms behind attention and feed-forward layer, none before; queries and keys normalized over
// all heads at once. OLMo 3 has windows on three layers of four, whose angles are never scaled. OLMo Team
// 2024, 2025.
#include <algorithm>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/dense_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Olmo2 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "olmo2"; }
  std::vector<std::string_view> model_types() const override { return {"olmo2", "olmo3"}; }

  std::string_view hf_defaults(std::string_view model_type) const override {
    if (model_type == "olmo3") {
      return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096,
        "rope_local_base_freq": 500000.0})";
    }
    return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5})";
  }

  void settle_hf(nlohmann::json& config) const override {
    if (config.value("model_type", "") != "olmo3") return;
    config["rope_local_base_freq"] = 500000.0;  // whatever rope_theta says
    settle_rope_of_layers(config);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    using W = LayerWeights;
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qk_norm = true});
    std::erase_if(weights, [](const WeightSpec& spec) { return spec.role == "attn_norm.weight"; });
    for (WeightSpec& spec : weights) {
      if (spec.role == "attn_q_norm.weight") spec.shape = {int64_t{config.heads} * config.head_dim};
      if (spec.role == "attn_k_norm.weight") spec.shape = {int64_t{config.kv_heads} * config.head_dim};
    }
    weights.push_back(norm_weight("post_attention_norm.weight", "post_attention_layernorm.weight",
                                  config.hidden, &W::attn_post_norm));
    add_feed_forward(weights, config);
    weights.push_back(norm_weight("post_ffw_norm.weight", "post_feedforward_layernorm.weight", config.hidden,
                                  &W::ffn_post_norm));
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    NormQkv qkv = qkv_of(w, config);
    qkv.norm_whole = true;
    x.norm_qkv(qkv);
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));
    x.project_add(project_of(w, config));
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"olmo2-7b", R"({"model_type": "olmo2", "num_hidden_layers": 32, "hidden_size": 4096,
      "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
      "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
      "tie_word_embeddings": false})"},
            {"olmo3-7b", R"({"model_type": "olmo3", "num_hidden_layers": 32, "hidden_size": 4096,
      "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278,
      "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "sliding_window": 4096,
      "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
      "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836}, "tie_word_embeddings": false})"},
            {"tiny-olmo2", R"({"model_type": "olmo2", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
      "tie_word_embeddings": false})"}};
  }

 protected:
  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    if (reader.is_gguf()) {
      read_gguf_windows(reader, config, slides);
    } else if (reader.hf().at("model_type") == "olmo3") {
      read_hf_windows(reader, config, hf_window(reader), slides);
      expect_plain_windows(reader);
    }
    if (!has_windows(config)) return;
    const double theta = reader.real_or("rope.freq_base", "rope_theta", 10000.0);
    const double own = reader.real_or("rope.freq_base_swa", "rope_local_base_freq", theta);
    if (!(own > 1)) reader.fail("rope theta of layers with a window", fmt::format("{}", own), "above 1");
    config.rope_window_inv_freq = plain_angles(own, config.head_dim);
  }

  void write_own(GgufKeys& keys) const override {
    if (!has_windows(keys.config())) return;
    write_windows(keys, slides);
    keys.real("rope.freq_base_swa", keys.reader().real_or("", "rope_local_base_freq", 500000.0));
  }

 private:
  static bool slides(int32_t layer) { return (layer + 1) % 4 != 0; }
  static bool has_windows(const ModelConfig& config) {
    return std::any_of(config.layer_windows.begin(), config.layer_windows.end(),
                       [](int32_t w) { return w > 0; });
  }
};

const Olmo2 kOlmo2Object{};

}  // namespace

const Architecture& kOlmo2 = kOlmo2Object;

}  // namespace millrace
