// Mistral 4, text: DeepSeek's layers; experts are chosen by softmax, and queries grow with their position.
// Mistral AI 2026.
#include "model/config_reader.h"
#include "model/latent_decoder.h"

namespace millrace {
namespace {

class Mistral4 final : public LatentDecoder {
 public:
  std::string_view name() const override { return "mistral4"; }
  std::vector<std::string_view> model_types() const override { return {"mistral4"}; }
  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
      "num_hidden_layers": 36, "num_attention_heads": 32, "n_shared_experts": 1, "n_routed_experts": 128,
      "routed_scaling_factor": 1.0, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "qk_nope_head_dim": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
      "first_k_dense_replace": 0, "norm_topk_prob": true, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6,
      "rope_interleave": true, "rope_parameters": {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
      "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0,
      "mscale": 1.0, "llama_4_scaling_beta": 0.1}})";
  }
  std::vector<SyntheticPreset> presets() const override {
    return {
        {"mistral-small-4", R"({"model_type": "mistral4", "num_hidden_layers": 36, "n_routed_experts": 128,
      "num_experts_per_tok": 4, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
      "num_attention_heads": 32, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
      "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 1048576,
      "tie_word_embeddings": false, "rope_parameters": {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
      "original_max_position_embeddings": 8192, "mscale_all_dim": 1.0, "mscale": 1.0,
      "llama_4_scaling_beta": 0.1}})"},
        {"tiny-mistral4", R"({"model_type": "mistral4", "num_hidden_layers": 2, "n_routed_experts": 6,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "num_attention_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32,
      "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 640, "max_position_embeddings": 2048,
      "tie_word_embeddings": false, "rope_parameters": {"type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
      "original_max_position_embeddings": 128, "mscale_all_dim": 1.0, "mscale": 1.0,
      "llama_4_scaling_beta": 0.2}})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("tekken", vocab);
  }

 protected:
  HfChoice hf_choice(const ConfigReader& reader) const override {
    return {.softmax = true, .renormalizes = reader.flag_or("", "norm_topk_prob", true)};
  }
};

const Mistral4 kMistral4Object{};

}  // namespace

const Architecture& kMistral4 = kMistral4Object;

}  // namespace millrace
