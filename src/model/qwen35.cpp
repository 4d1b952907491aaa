// Qwen 3.5 and 3.6, the text models: Qwen 3 Next's layers with their products in four matrices, dense or with
// experts. Positions of text are the same in all of MRoPE's parts. Qwen Team 2026.
#include <nlohmann/json.hpp>

#include "model/gated_delta.h"

namespace millrace {
namespace {

class Qwen35 : public GatedDeltaDecoder {
 public:
  std::string_view name() const override { return "qwen35"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_5_text", "qwen3_5"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
      "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "head_dim": 256,
      "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
      "linear_num_key_heads": 16, "linear_num_value_heads": 32})";
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen3.5-27b", R"({"model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120,
      "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
      "linear_num_key_heads": 16, "linear_num_value_heads": 48, "vocab_size": 248320,
      "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
      "full_attention_interval": 4, "tie_word_embeddings": false})"},
            {"tiny-qwen35", R"({"model_type": "qwen3_5_text", "num_hidden_layers": 4, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
      "linear_num_value_heads": 4, "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
      "rope_theta": 10000000, "full_attention_interval": 4, "tie_word_embeddings": false})"}};
  }

 protected:
  bool has_experts() const override { return false; }
  bool tiled_in_gguf() const override { return true; }
};

class Qwen35Moe final : public Qwen35 {
 public:
  std::string_view name() const override { return "qwen35moe"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_5_moe_text", "qwen3_5_moe"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
      "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "head_dim": 256,
      "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
      "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
      "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256})";
  }

  // Its class has neither: weights of experts are always divided by their sum, and no layer is dense.
  void settle_hf(nlohmann::json& config) const override {
    GatedDeltaDecoder::settle_hf(config);
    for (const char* key : {"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}) config.erase(key);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"qwen3.5-35b-a3b", R"({"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256,
      "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 512,
      "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
      "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
      "rope_theta": 10000000, "full_attention_interval": 4, "tie_word_embeddings": false})"},
        {"tiny-qwen35moe", R"({"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 64,
      "shared_expert_intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
      "linear_num_value_heads": 4, "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
      "rope_theta": 10000000, "full_attention_interval": 4, "tie_word_embeddings": false})"}};
  }

 protected:
  bool has_experts() const override { return true; }
};

const Qwen35 kQwen35Object{};
const Qwen35Moe kQwen35MoeObject{};

}  // namespace

const Architecture& kQwen35 = kQwen35Object;
const Architecture& kQwen35Moe = kQwen35MoeObject;

}  // namespace millrace
