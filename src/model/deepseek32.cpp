// DeepSeek 3.2: DeepSeek V3's layers with an indexer, by which a token reads 2,048 tokens of its context.
// DeepSeek-AI 2025. The layers that draft further tokens are not read.
#include "io/hf_directory.h"
#include "model/config_reader.h"
#include "model/latent_decoder.h"

namespace millrace {
namespace {

class DeepSeek32 final : public LatentDecoder {
 public:
  std::string_view name() const override { return "deepseek32"; }
  std::vector<std::string_view> model_types() const override { return {"deepseek_v32"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
      "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
      "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
      "first_k_dense_replace": 3, "norm_topk_prob": true, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
      "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})";
  }
  void settle_hf(nlohmann::json& config) const override {
    config["rope_interleave"] = true;  // of attention; the indexer's halves are never interleaved
    settle_layer_types(config);
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    LatentDecoder::read_config(reader, config);
    LatentShape& s = config.latent;
    if (s.q_rank == 0) reader.fail("q_lora_rank", "none", "above 0: the indexer reads compressed queries");
    s.index_heads = reader.integer("attention.indexer.head_count", "index_n_heads", 1, 1024);
    s.index_dim = reader.integer("attention.indexer.key_length", "index_head_dim", s.rope, 8192);
    s.index_top = reader.integer("attention.indexer.top_k", "index_topk", 1, 1 << 28);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"deepseek-v3.2", R"({"model_type": "deepseek_v32", "vocab_size": 129280, "rope_theta": 10000,
      "tie_word_embeddings": false, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
      "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})"},
        {"tiny-deepseek32", R"({"model_type": "deepseek_v32", "num_hidden_layers": 2, "n_routed_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "num_attention_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32, "qk_nope_head_dim": 32,
      "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
      "vocab_size": 640, "max_position_embeddings": 2048, "rope_theta": 10000, "tie_word_embeddings": false,
      "index_topk": 64, "index_head_dim": 32, "index_n_heads": 4})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("deepseek-v3", vocab);
  }

 protected:
  HfChoice hf_choice(const ConfigReader&) const override { return {}; }
};

const DeepSeek32 kDeepSeek32Object{};

}  // namespace

const Architecture& kDeepSeek32 = kDeepSeek32Object;

}  // namespace millrace
