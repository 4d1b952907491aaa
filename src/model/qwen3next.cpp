// Qwen 3 Next: three layers of gated delta nets, then one of gated attention with a quarter of each head
// rotated; many small experts beside a shared one in all of them. Qwen Team 2025.
#include "model/gated_delta.h"

namespace millrace {
namespace {

class Qwen3Next final : public GatedDeltaDecoder {
 public:
  std::string_view name() const override { return "qwen3next"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_next"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16,
      "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "head_dim": 256,
      "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
      "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
      "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
      "norm_topk_prob": true})";
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"qwen3-next-80b-a3b", R"({"model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512,
      "num_experts_per_tok": 10, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
      "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
      "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
      "rope_theta": 10000000, "full_attention_interval": 4, "tie_word_embeddings": false})"},
        {"tiny-qwen3next", R"({"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "shared_expert_intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
      "linear_num_value_heads": 4, "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
      "rope_theta": 10000000, "full_attention_interval": 4, "tie_word_embeddings": false})"}};
  }

 protected:
  bool fused_inputs() const override { return true; }
};

const Qwen3Next kQwen3NextObject{};

}  // namespace

const Architecture& kQwen3Next = kQwen3NextObject;

}  // namespace millrace
