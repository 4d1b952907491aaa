// Qwen 3, mixture of experts: Qwen 3's attention; each token goes to the k experts of largest router
// probability.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen3Moe final : public Architecture {
 public:
  std::string_view name() const override { return "qwen3moe"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_moe"}; }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    refuse_dense_layers(reader);
    config.experts = reader.integer("expert_count", "num_experts", 1, 4096);
    config.experts_per_token = reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
    config.expert_ffn = reader.integer("expert_feed_forward_length", "moe_intermediate_size", 1, 1 << 20);
    const bool renormalize = reader.is_gguf()
                                 ? reader.checkpoint().gguf->get_bool("qwen3moe.expert_weights_norm", true)
                                 : reader.hf().value("norm_topk_prob", false);
    config.expert_weighting =
        renormalize ? Route::Weighting::kSoftmaxAllRenormalized : Route::Weighting::kSoftmaxAll;
    read_hf_layer_types(reader, config);
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20));  // of dense layers, unused
    write_norm(keys);
    write_rope(keys);
    keys.size("expert_count", keys.config().experts);
    keys.size("expert_used_count", keys.config().experts_per_token);
    keys.size("expert_feed_forward_length", keys.config().expert_ffn);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qk_norm = true});
    weights.push_back(ffn_norm_weight(config));
    add_experts(weights, config,
                {.router_weight = "mlp.gate.weight",
                 .router_bias = "mlp.gate.bias",
                 .gate = {.single = "gate_proj"},
                 .up = {.single = "up_proj"},
                 .down = {.single = "down_proj"}});
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));
    x.project_add({w.attn_output.get(), w.attn_output_bias.get()});
    x.route(route_of(w, config));
    x.experts_add(experts_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen3-30b-a3b", R"({"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
      "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
      "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": true,
      "tie_word_embeddings": false})"},
            {"tiny-qwen3moe", R"({"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": true,
      "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }

 private:
  // config.json can make some layers dense; no published model does.
  static void refuse_dense_layers(const ConfigReader& reader) {
    if (reader.is_gguf()) return;
    const auto dense = reader.hf().find("mlp_only_layers");
    if ((dense != reader.hf().end() && dense->is_array() && !dense->empty()) ||
        reader.hf_real_or(reader.hf(), "decoder_sparse_step", 1) != 1) {
      throw_error(
          ErrorCode::kUnsupported,
          "{}: config.json: mlp_only_layers, decoder_sparse_step: found dense layers, expected experts "
          "in every layer",
          reader.checkpoint().path());
    }
  }
};

const Qwen3Moe kQwen3MoeObject{};

}  // namespace

const Architecture& kQwen3Moe = kQwen3MoeObject;

}  // namespace millrace
