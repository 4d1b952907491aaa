// OLMo 2: norms behind attention and feed-forward layer, none before; queries and keys normalized over all
// heads at once. OLMo Team 2024.
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/dense_decoder.h"

namespace millrace {
namespace {

class Olmo2 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "olmo2"; }
  std::vector<std::string_view> model_types() const override { return {"olmo2"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5})";
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
            {"tiny-olmo2", R"({"model_type": "olmo2", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
      "tie_word_embeddings": false})"}};
  }
};

const Olmo2 kOlmo2Object{};

}  // namespace

const Architecture& kOlmo2 = kOlmo2Object;

}  // namespace millrace
