// DeepSeek V2 and V3, and what has their layers: Kimi K2, Moonlight, GLM 4.7 Flash. DeepSeek-AI 2024. The
// layers that draft further tokens are not read.
#include <fmt/core.h>

#include <string>

#include "io/hf_directory.h"
#include "model/config_reader.h"
#include "model/latent_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class DeepSeek2 final : public LatentDecoder {
 public:
  std::string_view name() const override { return "deepseek2"; }
  std::vector<std::string_view> model_types() const override {
    return {"deepseek_v3", "deepseek_v2", "kimi_k2", "glm4_moe_lite"};
  }

  std::string_view hf_defaults(std::string_view model_type) const override {
    if (model_type == "deepseek_v2") {
      return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "first_k_dense_replace": 0, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_method": "greedy", "v_head_dim": 128,
        "moe_intermediate_size": 1407})";
    }
    if (model_type == "glm4_moe_lite") {
      return R"({"hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "num_hidden_layers": 47, "num_attention_heads": 20, "n_shared_experts": 1, "n_routed_experts": 64,
        "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
        "norm_topk_prob": true, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_interleave": true})";
    }
    return R"({"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
      "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
      "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
      "first_k_dense_replace": 3, "norm_topk_prob": true, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
      "rope_interleave": true})";
  }
  // GLM 4.7 Flash names the kind of each layer; without that its first one is dense.
  void settle_hf(nlohmann::json& config) const override {
    if (config.value("model_type", "") == "deepseek_v2") config["rope_interleave"] = true;  // always
    if (config.value("model_type", "") != "glm4_moe_lite") return;
    config["first_k_dense_replace"] = 1;
    settle_layer_types(config);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"deepseek-v3-lite", R"({"model_type": "deepseek_v3", "num_hidden_layers": 27, "n_routed_experts": 64,
      "num_experts_per_tok": 6, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
      "n_shared_experts": 2, "num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": null,
      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
      "routed_scaling_factor": 2.446, "norm_topk_prob": true, "first_k_dense_replace": 1, "vocab_size": 129280,
      "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": false,
      "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
      "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})"},
        {"deepseek-v3", R"({"model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256,
      "num_experts_per_tok": 8, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
      "n_shared_experts": 1, "num_attention_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
      "routed_scaling_factor": 2.5, "norm_topk_prob": true, "first_k_dense_replace": 3, "vocab_size": 129280,
      "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": false,
      "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
      "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})"},
        {"tiny-deepseek2", R"({"model_type": "deepseek_v3", "num_hidden_layers": 2, "n_routed_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "n_shared_experts": 1, "num_attention_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32,
      "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 2, "topk_group": 1,
      "routed_scaling_factor": 1.5, "norm_topk_prob": true, "first_k_dense_replace": 1, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": false,
      "rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
      "mscale_all_dim": 1.0, "original_max_position_embeddings": 256}})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("deepseek-v3", vocab);
  }

 protected:
  HfChoice hf_choice(const ConfigReader& reader) const override {
    if (reader.hf().value("model_type", "") == "glm4_moe_lite") {
      const int32_t dims = reader.integer("", "qk_rope_head_dim", 2, 1 << 17);
      if (const int32_t rotated = hf_rotary_dims(reader, dims); rotated != dims) {
        reader.fail("config.json: partial_rotary_factor", fmt::format("{} of {} dimensions", rotated, dims),
                    "all of qk_rope_head_dim");
      }
    }
    if (reader.hf().value("model_type", "") != "deepseek_v2") return {};
    const std::string method = reader.hf().value("topk_method", "greedy");
    if (method != "greedy" && method != "group_limited_greedy") {
      reader.fail("config.json: topk_method", method, "greedy or group_limited_greedy");
    }
    return {.softmax = true, .ignores_groups = method == "greedy"};
  }
  bool softmax_groups_by_largest() const override { return true; }
};

const DeepSeek2 kDeepSeek2Object{};

}  // namespace

const Architecture& kDeepSeek2 = kDeepSeek2Object;

}  // namespace millrace
