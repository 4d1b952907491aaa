#include "model/latent_decoder.h"

#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

constexpr float kIndexNormEps = 1e-6f;  // transformers' class has it so; files do not say

// Sizes as transformers has them, or as llama.cpp does: newer files count the absorbed heads and have the
// others beside them (key_length_mla), older ones have the others alone.
void read_latent(const ConfigReader& reader, ModelConfig& config) {
  read_outer_sizes(reader, config);
  read_norm_eps(reader, config, "rms_norm_eps", 1e-6);
  constexpr int64_t kMost = 8192;  // dimensions of one head
  LatentShape& s = config.latent;
  s.rank = reader.integer("attention.kv_lora_rank", "kv_lora_rank", 1, kMost);
  s.q_rank = reader.integer_or("attention.q_lora_rank", "q_lora_rank", 0, 1 << 17, 0);
  s.rope = reader.integer("rope.dimension_count", "qk_rope_head_dim", 2, kMost);
  if (reader.is_gguf()) {
    const bool absorbed = reader.integer_or("attention.key_length_mla", "", 0, kMost, 0) > 0;
    const int32_t key =
        reader.integer(absorbed ? "attention.key_length_mla" : "attention.key_length", "", s.rope + 1, kMost);
    s.nope = key - s.rope;
    s.value =
        reader.integer(absorbed ? "attention.value_length_mla" : "attention.value_length", "", 1, kMost);
  } else {
    s.nope = reader.integer("", "qk_nope_head_dim", 1, kMost);
    s.value = reader.integer("", "v_head_dim", 1, kMost);
  }
  expect_silu(reader);
  config.head_dim = s.rope + s.rank;
  config.kv_heads = 1;
}

// V2 chooses from groups by the largest score of each. Mistral 4's classes would by the largest two of the
// softmax, which no published model does.
void settle_groups(const ConfigReader& reader, ModelConfig& config, bool ignored, bool by_largest) {
  if (ignored) config.expert_groups = config.expert_groups_chosen = 1;
  if (by_largest || config.expert_groups == config.expert_groups_chosen) return;
  throw_error(ErrorCode::kUnsupported, "{}: experts chosen by softmax: found {} of {} groups, expected all",
              reader.checkpoint().path(), config.expert_groups_chosen, config.expert_groups);
}

// Of the indexer (NormLatentQkv::index_q), beside compressed queries.
void add_indexer(std::vector<WeightSpec>& to, const ModelConfig& c) {
  using W = LatentWeights;
  const LatentShape& s = c.latent;
  to.push_back(matrix_weight("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight",
                             int64_t{s.index_heads} * s.index_dim, s.q_rank, own_weight(&W::index_q)));
  to.push_back(matrix_weight("indexer.attn_k.weight", "self_attn.indexer.wk.weight", s.index_dim, c.hidden,
                             own_weight(&W::index_k)));
  to.push_back(norm_weight("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", s.index_dim,
                           own_weight(&W::index_k_norm)));
  to.push_back(bias_weight("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", {s.index_dim},
                           own_weight(&W::index_k_norm_bias), Presence::kRequired));
  to.push_back(matrix_weight("indexer.proj.weight", "self_attn.indexer.weights_proj.weight", s.index_heads,
                             c.hidden, own_weight(&W::index_weights)));
}

}  // namespace

void LatentDecoder::add_latent_attention(std::vector<WeightSpec>& to, const ModelConfig& c) {
  using W = LatentWeights;
  const LatentShape& s = c.latent;
  const int64_t heads = c.heads, q = heads * (s.nope + s.rope), kv = s.rank + s.rope;
  const Presence rare = Presence::kRare;
  to.push_back(norm_weight("attn_norm.weight", "input_layernorm.weight", c.hidden, &LayerWeights::attn_norm));
  if (s.q_rank > 0) {
    to.push_back(matrix_weight("attn_q_a.weight", "self_attn.q_a_proj.weight", s.q_rank, c.hidden,
                               own_weight(&W::q_a)));
    to.push_back(
        bias_weight("attn_q_a.bias", "self_attn.q_a_proj.bias", {s.q_rank}, own_weight(&W::q_a_bias), rare));
    to.push_back(norm_weight("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", s.q_rank,
                             own_weight(&W::q_a_norm)));
    to.push_back(
        matrix_weight("attn_q_b.weight", "self_attn.q_b_proj.weight", q, s.q_rank, &LayerWeights::attn_q));
  } else {
    to.push_back(
        matrix_weight("attn_q.weight", "self_attn.q_proj.weight", q, c.hidden, &LayerWeights::attn_q));
  }
  if (s.index_top > 0) add_indexer(to, c);
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

std::vector<std::pair<std::string_view, std::string_view>> LatentDecoder::hf_aliases() const {
  return {{"num_local_experts", "n_routed_experts"}, {"num_experts", "n_routed_experts"}};
}

void LatentDecoder::settle_layer_types(nlohmann::json& config) {
  const auto types = config.find("mlp_layer_types");
  if (types == config.end() || !types->is_array()) return;
  size_t dense = 0;
  while (dense < types->size() && (*types)[dense] == "dense") ++dense;
  for (size_t l = dense; l < types->size(); ++l) {
    if ((*types)[l] == "sparse") continue;
    throw_error(ErrorCode::kUnsupported,
                "config.json: mlp_layer_types[{}]: found {}, expected dense layers first and sparse ones "
                "behind them",
                l, (*types)[l].dump());
  }
  config["first_k_dense_replace"] = dense;
}

void LatentDecoder::read_config(const ConfigReader& reader, ModelConfig& config) const {
  read_latent(reader, config);
  const int32_t drafting = reader.integer_or("nextn_predict_layers", "", 0, config.layers - 1, 0);
  config.layers -= drafting;  // GGUF files count them
  config.layer_windows.resize(static_cast<size_t>(config.layers));
  const HfChoice choice = reader.is_gguf() ? HfChoice{} : hf_choice(reader);
  read_deepseek_experts(reader, config, reader.is_gguf() || choice.softmax);
  if (config.expert_weighting == Route::Weighting::kSoftmaxAll ||
      config.expert_weighting == Route::Weighting::kSoftmaxAllRenormalized) {
    settle_groups(reader, config, choice.ignores_groups, softmax_groups_by_largest());
    if (choice.renormalizes) config.expert_weighting = Route::Weighting::kSoftmaxAllRenormalized;
  }
  config.rotary_dims = config.latent.rope;
  config.rope_interleaved = reader.is_gguf() || reader.flag_or("", "rope_interleave", true);
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

void LatentDecoder::write_keys(GgufKeys& keys) const {
  const ModelConfig& c = keys.config();
  if (!c.rope_interleaved) {
    throw_error(ErrorCode::kUnsupported,
                "{}: config.json: rope_interleave: found false, expected true: GGUF's {} has no key for it",
                keys.reader().checkpoint().path(), c.architecture);
  }
  write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20),  // of dense layers
              c.state_layers.empty());
  keys.size("attention.key_length_mla", c.latent.nope + c.latent.rope);
  keys.size("attention.value_length_mla", c.latent.value);
  keys.size("attention.kv_lora_rank", c.latent.rank);
  if (c.latent.q_rank > 0) keys.size("attention.q_lora_rank", c.latent.q_rank);
  if (c.latent.index_top > 0) {
    keys.size("attention.indexer.head_count", c.latent.index_heads);
    keys.size("attention.indexer.key_length", c.latent.index_dim);
    keys.size("attention.indexer.top_k", c.latent.index_top);
  }
  keys.size("rope.dimension_count", c.latent.rope);
  write_norm(keys);
  if (c.own.at("latent_eps") != c.norm_eps)
    keys.real("attention.latent_norm_epsilon", c.own.at("latent_eps"));
  write_rope(keys);
  write_query_growth(keys);
  write_deepseek_experts(keys);
}

std::unique_ptr<LayerWeights> LatentDecoder::new_layer() const { return std::make_unique<LatentWeights>(); }

std::vector<WeightSpec> LatentDecoder::layer_weights(const ModelConfig& config, int layer) const {
  std::vector<WeightSpec> weights;
  add_latent_attention(weights, config);
  add_behind_attention(weights, config, layer);
  return weights;
}

LatentDecoder::FeedForwardNamesOf LatentDecoder::behind_attention(const ModelConfig& config) const {
  return {.experts = usual_experts(config),
          .choice_bias = "mlp.gate.e_score_correction_bias",
          .shared = {.gate = "mlp.shared_experts.gate_proj.weight",
                     .up = "mlp.shared_experts.up_proj.weight",
                     .down = "mlp.shared_experts.down_proj.weight"}};
}

void LatentDecoder::add_behind_attention(std::vector<WeightSpec>& to, const ModelConfig& config,
                                         int layer) const {
  to.push_back(ffn_norm_weight(config));
  if (config.is_dense(layer)) return add_feed_forward(to, config);
  const FeedForwardNamesOf names = behind_attention(config);
  add_experts(to, config, names.experts);
  if (config.expert_weighting == Route::Weighting::kSigmoid ||
      config.expert_weighting == Route::Weighting::kSigmoidRenormalized) {
    to.push_back(choice_bias_weight(config));
    to.back().hf = names.choice_bias;
    to.back().presence = Presence::kUsual;
  }
  add_shared_expert(to, config, names.shared);
}

void LatentDecoder::layer(Executor& x, const LayerWeights& weights, const ModelConfig& config,
                          int index) const {
  attend_latent(x, static_cast<const LatentWeights&>(weights), config, index);
  feed_forward_or_experts(x, weights, config, index);
}

void LatentDecoder::attend_latent(Executor& x, const LatentWeights& w, const ModelConfig& config, int index) {
  const float eps = config.own.at("latent_eps");
  x.norm_latent_qkv(
      {.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
       .q_a = {w.q_a.get(), w.q_a_bias.get()},
       .q_a_norm = {w.q_a_norm.get(), eps},
       .q = {w.attn_q.get()},
       .kv_a = {w.kv_a.get(), w.kv_a_bias.get()},
       .kv_a_norm = {w.kv_a_norm.get(), eps},
       .k_b = {w.k_b.get()},
       .index_q = {w.index_q.get()},
       .index_k = {w.index_k.get()},
       .index_k_norm = {w.index_k_norm.get(), kIndexNormEps, w.index_k_norm_bias.get(), Norm::Kind::kLayer},
       .index_weights = {w.index_weights.get()}});
  Rope rope = rope_of(config, index);
  rope.growth = query_growth(config);
  x.rope_append_kv(rope);
  x.attend(attend_of(w, config, index));
  Projection projection = project_of(w, config);
  projection.head_values = {w.v_b.get()};
  x.project_add(projection);
}

}  // namespace millrace
