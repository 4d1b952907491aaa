// DeepSeek V2 and V3 (and what has their layers: Kimi K2, Moonlight, GLM 4.7 Flash): latent attention, of
// which one vector a token is cached, a dense start, then routed experts beside shared ones. DeepSeek-AI
// 2024. The layers that draft further tokens are not read.
#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

struct LatentWeights final : LayerWeights {
  WeightPtr q_a, q_a_bias, q_a_norm, kv_a, kv_a_bias, kv_a_norm, k_b, v_b;
};

class DeepSeek2 : public Architecture {
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
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_local_experts", "n_routed_experts"}, {"num_experts", "n_routed_experts"}};
  }

  // GLM 4.7 Flash names the kind of each layer; without that its first one is dense.
  void settle_hf(nlohmann::json& config) const override {
    if (config.value("model_type", "") != "glm4_moe_lite") return;
    size_t dense = 1;
    const auto types = config.find("mlp_layer_types");
    if (types != config.end() && types->is_array()) {
      for (dense = 0; dense < types->size() && (*types)[dense] == "dense";) ++dense;
      for (size_t l = dense; l < types->size(); ++l) {
        if ((*types)[l] != "sparse") {
          throw_error(
              ErrorCode::kUnsupported,
              "config.json: mlp_layer_types[{}]: found {}, expected dense layers first and sparse ones "
              "behind them",
              l, (*types)[l].dump());
        }
      }
    }
    config["first_k_dense_replace"] = dense;
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_latent(reader, config);
    const int32_t drafting = reader.integer_or("nextn_predict_layers", "", 0, config.layers - 1, 0);
    config.layers -= drafting;  // GGUF files count them
    config.layer_windows.resize(static_cast<size_t>(config.layers));
    const std::string type = reader.is_gguf() ? "" : reader.hf().value("model_type", "");
    const bool v2 = type == "deepseek_v2";
    read_deepseek_experts(reader, config, reader.is_gguf() || v2 || type == "mistral4");
    if (config.expert_weighting != Route::Weighting::kSigmoid &&
        config.expert_weighting != Route::Weighting::kSigmoidRenormalized) {
      check_choice(reader, config, v2 ? reader.hf().value("topk_method", "greedy") == "greedy" : false);
      const bool normed = type == "mistral4" && reader.flag_or("", "norm_topk_prob", true);
      if (normed) config.expert_weighting = Route::Weighting::kSoftmaxAllRenormalized;
    }
    config.rotary_dims = config.latent.rope;
    config.rope_interleaved = reader.is_gguf() || v2 || reader.flag_or("", "rope_interleave", true);
    read_rope(reader, config);
    read_query_growth(reader, config);
    // Of queries and keys before they are absorbed; YaRN scales all of their dimensions.
    const double dims = config.latent.nope + config.latent.rope;
    const double stretched = yarn_score_scale(reader);
    config.attention_scale = static_cast<float>(stretched * stretched / std::sqrt(dims));
    // The norms of what is compressed have the default of transformers' class, whatever the file says.
    const double eps = reader.is_gguf() ? config.norm_eps : 1e-6;
    config.own["latent_eps"] = static_cast<float>(reader.real_or("attention.latent_norm_epsilon", "", eps));
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    if (!c.rope_interleaved) {
      throw_error(ErrorCode::kUnsupported,
                  "{}: config.json: rope_interleave: found false, expected true: GGUF's {} has no key for it",
                  keys.reader().checkpoint().path(), c.architecture);
    }
    write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20));  // of dense layers
    keys.size("attention.key_length_mla", c.latent.nope + c.latent.rope);
    keys.size("attention.value_length_mla", c.latent.value);
    keys.size("attention.kv_lora_rank", c.latent.rank);
    if (c.latent.q_rank > 0) keys.size("attention.q_lora_rank", c.latent.q_rank);
    keys.size("rope.dimension_count", c.latent.rope);
    write_norm(keys);
    if (c.own.at("latent_eps") != c.norm_eps)
      keys.real("attention.latent_norm_epsilon", c.own.at("latent_eps"));
    write_rope(keys);
    write_query_growth(keys);
    write_deepseek_experts(keys);
  }

  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<LatentWeights>(); }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    std::vector<WeightSpec> weights;
    add_latent_attention(weights, config);
    weights.push_back(ffn_norm_weight(config));
    if (config.is_dense(layer)) {
      add_feed_forward(weights, config);
      return weights;
    }
    add_experts(weights, config, usual_experts(config));
    if (config.expert_weighting == Route::Weighting::kSigmoid ||
        config.expert_weighting == Route::Weighting::kSigmoidRenormalized) {
      weights.push_back(choice_bias_weight(config));
      weights.back().presence = Presence::kUsual;
    }
    add_shared_expert(weights, config,
                      {.gate = "mlp.shared_experts.gate_proj.weight",
                       .up = "mlp.shared_experts.up_proj.weight",
                       .down = "mlp.shared_experts.down_proj.weight"});
    return weights;
  }

  void layer(Executor& x, const LayerWeights& weights, const ModelConfig& config, int index) const override {
    const auto& w = static_cast<const LatentWeights&>(weights);
    const float eps = config.own.at("latent_eps");
    x.norm_latent_qkv({.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
                       .q_a = {w.q_a.get(), w.q_a_bias.get()},
                       .q_a_norm = {w.q_a_norm.get(), eps},
                       .q = {w.attn_q.get()},
                       .kv_a = {w.kv_a.get(), w.kv_a_bias.get()},
                       .kv_a_norm = {w.kv_a_norm.get(), eps},
                       .k_b = {w.k_b.get()}});
    Rope rope = rope_of(config, index);
    rope.growth = query_growth(config);
    x.rope_append_kv(rope);
    x.attend(attend_of(w, config, index));
    Projection projection = project_of(w, config);
    projection.head_values = {w.v_b.get()};
    x.project_add(projection);
    if (config.is_dense(index)) return x.ffn_add(ffn_of(w, config));
    x.route(route_of(w, config));
    x.experts_add(experts_of(w, config));
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

 private:
  // Sizes as transformers has them, or as llama.cpp does: newer files count the absorbed heads and have the
  // others beside them (key_length_mla), older ones have the others alone.
  static void read_latent(const ConfigReader& reader, ModelConfig& config) {
    config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
    config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
    config.heads = reader.integer("attention.head_count", "num_attention_heads", 1, 1024);
    config.context_length = reader.integer("context_length", "max_position_embeddings", 1, 1 << 28);
    config.norm_eps =
        static_cast<float>(reader.real_or("attention.layer_norm_rms_epsilon", "rms_norm_eps", 1e-6));
    if (!(config.norm_eps > 0))
      reader.fail("rms norm epsilon", fmt::format("{}", config.norm_eps), "above 0");
    constexpr int64_t kMost = 8192;  // dimensions of one head
    LatentShape& s = config.latent;
    s.rank = reader.integer("attention.kv_lora_rank", "kv_lora_rank", 1, kMost);
    s.q_rank = reader.integer_or("attention.q_lora_rank", "q_lora_rank", 0, 1 << 17, 0);
    s.rope = reader.integer("rope.dimension_count", "qk_rope_head_dim", 2, kMost);
    if (reader.is_gguf()) {
      const bool absorbed = reader.integer_or("attention.key_length_mla", "", 0, kMost, 0) > 0;
      const int32_t key = reader.integer(absorbed ? "attention.key_length_mla" : "attention.key_length", "",
                                         s.rope + 1, kMost);
      s.nope = key - s.rope;
      s.value =
          reader.integer(absorbed ? "attention.value_length_mla" : "attention.value_length", "", 1, kMost);
    } else {
      s.nope = reader.integer("", "qk_nope_head_dim", 1, kMost);
      s.value = reader.integer("", "v_head_dim", 1, kMost);
      const auto activation = reader.hf().find("hidden_act");
      if (activation != reader.hf().end() && *activation != "silu" && *activation != "swish") {
        reader.fail("config.json: hidden_act", activation->dump(), "\"silu\"");
      }
    }
    config.head_dim = s.rope + s.rank;
    config.kv_heads = 1;
    config.layer_windows.assign(config.layers, 0);
  }

  // The first V2 chose from groups by the largest of each, Mistral 4 by the largest two; none of those
  // published does.
  static void check_choice(const ConfigReader& reader, const ModelConfig& config, bool greedy) {
    if (greedy || config.expert_groups == config.expert_groups_chosen) return;
    throw_error(ErrorCode::kUnsupported, "{}: experts chosen by softmax: found {} of {} groups, expected all",
                reader.checkpoint().path(), config.expert_groups_chosen, config.expert_groups);
  }

  static void add_latent_attention(std::vector<WeightSpec>& to, const ModelConfig& c) {
    using W = LatentWeights;
    const LatentShape& s = c.latent;
    const int64_t heads = c.heads, q = heads * (s.nope + s.rope), kv = s.rank + s.rope;
    const Presence rare = Presence::kRare;
    to.push_back(
        norm_weight("attn_norm.weight", "input_layernorm.weight", c.hidden, &LayerWeights::attn_norm));
    if (s.q_rank > 0) {
      to.push_back(matrix_weight("attn_q_a.weight", "self_attn.q_a_proj.weight", s.q_rank, c.hidden,
                                 own_weight(&W::q_a)));
      to.push_back(bias_weight("attn_q_a.bias", "self_attn.q_a_proj.bias", {s.q_rank},
                               own_weight(&W::q_a_bias), rare));
      to.push_back(norm_weight("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", s.q_rank,
                               own_weight(&W::q_a_norm)));
      to.push_back(
          matrix_weight("attn_q_b.weight", "self_attn.q_b_proj.weight", q, s.q_rank, &LayerWeights::attn_q));
    } else {
      to.push_back(
          matrix_weight("attn_q.weight", "self_attn.q_proj.weight", q, c.hidden, &LayerWeights::attn_q));
    }
    to.push_back(matrix_weight("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", kv, c.hidden,
                               own_weight(&W::kv_a)));
    to.push_back(bias_weight("attn_kv_a_mqa.bias", "self_attn.kv_a_proj_with_mqa.bias", {kv},
                             own_weight(&W::kv_a_bias), rare));
    to.push_back(norm_weight("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", s.rank,
                             own_weight(&W::kv_a_norm)));
    const auto per_head = [&](std::string_view role, int64_t rows, int64_t cols, int64_t first, bool turned,
                              WeightMember member) {
      to.push_back({.role = role,
                    .shape = {heads, rows, cols},
                    .use = WeightUse::kMatrix,
                    .to = member,
                    .spread = 1.0 / std::sqrt(static_cast<double>(cols)),
                    .heads_of = HeadsOf{.gguf = "attn_kv_b.weight",
                                        .hf = "self_attn.kv_b_proj.weight",
                                        .first_row = first,
                                        .head_rows = s.nope + s.value,
                                        .turned = turned}});
    };
    per_head("attn_k_b.weight", s.rank, s.nope, 0, true, own_weight(&W::k_b));
    per_head("attn_v_b.weight", s.value, s.rank, s.nope, false, own_weight(&W::v_b));
    to.push_back(matrix_weight("attn_output.weight", "self_attn.o_proj.weight", c.hidden, heads * s.value,
                               &LayerWeights::attn_output));
    to.push_back(bias_weight("attn_output.bias", "self_attn.o_proj.bias", {c.hidden},
                             &LayerWeights::attn_output_bias, rare));
  }
};

// The same layers; experts are chosen by softmax, and queries grow with their position. Mistral AI 2026.
class Mistral4 final : public DeepSeek2 {
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
    return {{"tiny-mistral4", R"({"model_type": "mistral4", "num_hidden_layers": 2, "n_routed_experts": 6,
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
};

const DeepSeek2 kDeepSeek2Object{};
const Mistral4 kMistral4Object{};

}  // namespace

const Architecture& kDeepSeek2 = kDeepSeek2Object;
const Architecture& kMistral4 = kMistral4Object;

}  // namespace millrace
