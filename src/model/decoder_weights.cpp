#include "model/decoder_weights.h"

#include <cmath>

namespace millrace {
namespace {

// Keeps a unit input a unit output.
double matrix_spread(int64_t cols) { return 1.0 / std::sqrt(static_cast<double>(cols)); }

}  // namespace

WeightSpec norm_weight(std::string_view role, std::string_view hf, int64_t size, WeightMember to) {
  return {.role = role, .hf = hf, .shape = {size}, .to = to};
}

WeightSpec matrix_weight(std::string_view role, std::string_view hf, int64_t rows, int64_t cols,
                         WeightMember to) {
  return {.role = role,
          .hf = hf,
          .shape = {rows, cols},
          .use = WeightUse::kDequantized,
          .to = to,
          .spread = matrix_spread(cols)};
}

WeightSpec bias_weight(std::string_view role, std::string_view hf, std::vector<int64_t> shape,
                       WeightMember to, Presence presence) {
  return {.role = role,
          .hf = hf,
          .shape = std::move(shape),
          .to = to,
          .presence = presence,
          .spread = kBiasSpread};
}

void add_attention(std::vector<WeightSpec>& to, const ModelConfig& c, const AttentionWeights& weights) {
  using W = LayerWeights;
  const int64_t q = int64_t{c.heads} * c.head_dim, kv = int64_t{c.kv_heads} * c.head_dim;
  const auto rotated = [&](WeightSpec spec) {
    spec.interleaved_in_gguf = weights.interleaved_in_gguf;
    to.push_back(std::move(spec));
  };
  to.push_back(norm_weight("attn_norm.weight", "input_layernorm.weight", c.hidden, &W::attn_norm));
  rotated(matrix_weight("attn_q.weight", "self_attn.q_proj.weight", q, c.hidden, &W::attn_q));
  rotated(matrix_weight("attn_k.weight", "self_attn.k_proj.weight", kv, c.hidden, &W::attn_k));
  to.push_back(matrix_weight("attn_v.weight", "self_attn.v_proj.weight", kv, c.hidden, &W::attn_v));
  to.push_back(matrix_weight("attn_output.weight", "self_attn.o_proj.weight", c.hidden, q, &W::attn_output));
  const Presence biases = weights.qkv_biases;
  rotated(bias_weight("attn_q.bias", "self_attn.q_proj.bias", {q}, &W::attn_q_bias, biases));
  rotated(bias_weight("attn_k.bias", "self_attn.k_proj.bias", {kv}, &W::attn_k_bias, biases));
  to.push_back(bias_weight("attn_v.bias", "self_attn.v_proj.bias", {kv}, &W::attn_v_bias, biases));
  to.push_back(bias_weight("attn_output.bias", "self_attn.o_proj.bias", {c.hidden}, &W::attn_output_bias,
                           weights.output_bias));
  if (!weights.qk_norm) return;
  to.push_back(norm_weight("attn_q_norm.weight", "self_attn.q_norm.weight", c.head_dim, &W::attn_q_norm));
  to.push_back(norm_weight("attn_k_norm.weight", "self_attn.k_norm.weight", c.head_dim, &W::attn_k_norm));
}

WeightSpec ffn_norm_weight(const ModelConfig& c) {
  return norm_weight("ffn_norm.weight", "post_attention_layernorm.weight", c.hidden, &LayerWeights::ffn_norm);
}

void add_feed_forward(std::vector<WeightSpec>& to, const ModelConfig& c, const FeedForwardNames& names) {
  using W = LayerWeights;
  const Presence biases = Presence::kRare;
  to.push_back(matrix_weight("ffn_gate.weight", names.gate, c.ffn, c.hidden, &W::ffn_gate));
  to.push_back(matrix_weight("ffn_up.weight", names.up, c.ffn, c.hidden, &W::ffn_up));
  to.push_back(matrix_weight("ffn_down.weight", names.down, c.hidden, c.ffn, &W::ffn_down));
  to.push_back(bias_weight("ffn_gate.bias", "mlp.gate_proj.bias", {c.ffn}, &W::ffn_gate_bias, biases));
  to.push_back(bias_weight("ffn_up.bias", "mlp.up_proj.bias", {c.ffn}, &W::ffn_up_bias, biases));
  to.push_back(bias_weight("ffn_down.bias", "mlp.down_proj.bias", {c.hidden}, &W::ffn_down_bias, biases));
}

void add_experts(std::vector<WeightSpec>& to, const ModelConfig& c, const ExpertWeights& weights) {
  using W = LayerWeights;
  const auto matrix = [&](std::string_view role, const HfExperts& hf, int64_t rows, int64_t cols,
                          WeightMember member) {
    to.push_back({.role = role,
                  .shape = {c.experts, rows, cols},
                  .use = WeightUse::kMatrix,
                  .to = member,
                  .spread = matrix_spread(cols),
                  .experts = hf});
  };
  const auto bias = [&](std::string_view role, const HfExperts& hf, int64_t rows, WeightMember member) {
    to.push_back(bias_weight(role, "", {c.experts, rows}, member, weights.biases));
    to.back().experts = hf;
  };
  to.push_back({.role = "ffn_gate_inp.weight",
                .hf = weights.router_weight,
                .shape = {c.experts, c.hidden},
                .use = WeightUse::kMatrix,
                .to = &W::router,
                .spread = matrix_spread(c.hidden)});
  if (!weights.router_also.empty()) {
    to.back().part_of = PartOf{.hf = weights.router_also, .first_row = 0, .all_rows = c.experts};
  }
  to.push_back(
      bias_weight("ffn_gate_inp.bias", weights.router_bias, {c.experts}, &W::router_bias, weights.biases));
  matrix("ffn_gate_exps.weight", weights.gate, c.expert_ffn, c.hidden, &W::gate_experts);
  matrix("ffn_up_exps.weight", weights.up, c.expert_ffn, c.hidden, &W::up_experts);
  matrix("ffn_down_exps.weight", weights.down, c.hidden, c.expert_ffn, &W::down_experts);
  bias("ffn_gate_exps.bias", weights.gate, c.expert_ffn, &W::gate_experts_bias);
  bias("ffn_up_exps.bias", weights.up, c.expert_ffn, &W::up_experts_bias);
  bias("ffn_down_exps.bias", weights.down, c.hidden, &W::down_experts_bias);
}

ExpertWeights usual_experts(const ModelConfig& c) {
  constexpr std::string_view kBoth = "mlp.experts.gate_up_proj";
  return {.router_weight = "mlp.gate.weight",
          .router_bias = "mlp.gate.bias",
          .gate = {.single = "gate_proj", .stacked = kBoth, .parts = 2},
          .up = {.single = "up_proj", .first_row = c.expert_ffn, .stacked = kBoth, .parts = 2},
          .down = {.single = "down_proj", .stacked = "mlp.experts.down_proj"}};
}

void add_shared_expert(std::vector<WeightSpec>& to, const ModelConfig& c, const FeedForwardNames& names) {
  using W = LayerWeights;
  to.push_back(matrix_weight("ffn_gate_shexp.weight", names.gate, c.shared_ffn, c.hidden, &W::shared_gate));
  to.push_back(matrix_weight("ffn_up_shexp.weight", names.up, c.shared_ffn, c.hidden, &W::shared_up));
  to.push_back(matrix_weight("ffn_down_shexp.weight", names.down, c.hidden, c.shared_ffn, &W::shared_down));
}

void add_mixed_shared_expert(std::vector<WeightSpec>& to, const ModelConfig& config) {
  add_shared_expert(to, config,
                    {.gate = "mlp.shared_expert.gate_proj.weight",
                     .up = "mlp.shared_expert.up_proj.weight",
                     .down = "mlp.shared_expert.down_proj.weight"});
  // GGUF files hold it as [hidden].
  to.push_back(matrix_weight("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", 1, config.hidden,
                             &LayerWeights::shared_mix));
}

WeightSpec choice_bias_weight(const ModelConfig& c) {
  return bias_weight("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", {c.experts},
                     &LayerWeights::choice_bias, Presence::kRequired);
}

}  // namespace millrace
