// GLM 4.5 and 4.6: half of each head is rotated, q and k may be normed, and experts are chosen by sigmoids
// beside a shared one; the first layers are dense. The layer that drafts a second token is not read.
// Zhipu AI 2025.
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/mixture_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Glm4Moe final : public MixtureDecoder {
 public:
  std::string_view name() const override { return "glm4moe"; }
  std::vector<std::string_view> model_types() const override { return {"glm4_moe"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
      "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
      "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
      "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
      "first_k_dense_replace": 1, "norm_topk_prob": true, "use_qk_norm": false})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_local_experts", "n_routed_experts"}};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    // GGUF files count the layer that drafts.
    const int32_t drafting = reader.integer_or("nextn_predict_layers", "", 0, config.layers - 1, 0);
    config.layers -= drafting;
    config.layer_windows.resize(static_cast<size_t>(config.layers));
    // llama.cpp's files have no such key: their tensors show it.
    const bool normed =
        reader.is_gguf() && reader.checkpoint().find_tensor("blk.0.attn_q_norm.weight") != nullptr;
    const bool qk_norm = reader.flag_or("attention.qk_norm", "use_qk_norm", normed);
    config.own["qk_norm"] = qk_norm ? 1.0f : 0.0f;
    read_deepseek_experts(reader, config);
    if (!reader.is_gguf()) config.rotary_dims = hf_rotary_dims(reader, config.head_dim);
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20));  // of dense layers
    keys.size("rope.dimension_count", keys.config().rotary_dims);
    write_norm(keys);
    write_rope(keys);
    write_deepseek_experts(keys);
    keys.flag("attention.qk_norm", keys.config().own.at("qk_norm") != 0.0f);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"glm-4.5-air", R"({"model_type": "glm4_moe", "num_hidden_layers": 46, "n_routed_experts": 128,
      "num_experts_per_tok": 8, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
      "n_shared_experts": 1, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151552, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
      "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "norm_topk_prob": true,
      "routed_scaling_factor": 1.0, "use_qk_norm": false, "tie_word_embeddings": false})"},
            {"tiny-glm4moe", R"({"model_type": "glm4_moe", "num_hidden_layers": 2, "n_routed_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "n_shared_experts": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
      "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "norm_topk_prob": true, "n_group": 2,
      "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": true, "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 protected:
  AttentionWeights attention_weights(const ModelConfig& config) const override {
    return {.qk_norm = config.own.at("qk_norm") != 0.0f};
  }
  WeightSpec second_norm_weight(const ModelConfig& config) const override {
    WeightSpec norm = ffn_norm_weight(config);
    norm.gguf = {"post_attention_norm.weight"};
    return norm;
  }
  void add_beside_experts(std::vector<WeightSpec>& to, const ModelConfig& config) const override {
    to.push_back(choice_bias_weight(config));
    add_shared_expert(to, config,
                      {.gate = "mlp.shared_experts.gate_proj.weight",
                       .up = "mlp.shared_experts.up_proj.weight",
                       .down = "mlp.shared_experts.down_proj.weight"});
  }
};

const Glm4Moe kGlm4MoeObject{};

}  // namespace

const Architecture& kGlm4Moe = kGlm4MoeObject;

}  // namespace millrace
