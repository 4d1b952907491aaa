#include "model/decoder_layer.h"

#include <cmath>

namespace millrace {

Norm norm_of(const ModelConfig& config, const WeightPtr& weight, const WeightPtr& bias) {
  return {weight.get(), config.norm_eps, bias.get(), config.norm_kind};
}

NormQkv qkv_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
          .q = {w.attn_q.get(), w.attn_q_bias.get()},
          .k = {w.attn_k.get(), w.attn_k_bias.get()},
          .v = {w.attn_v.get(), w.attn_v_bias.get()},
          .q_norm = {w.attn_q_norm.get(), config.norm_eps},
          .k_norm = {w.attn_k_norm.get(), config.norm_eps}};
}

Rope rope_of(const ModelConfig& config, int layer) {
  const bool own =
      config.layer_windows[static_cast<size_t>(layer)] > 0 && !config.rope_window_inv_freq.empty();
  std::span<const float> inv_freq = own ? config.rope_window_inv_freq : config.rope_inv_freq;
  if (!config.is_rotated(layer)) inv_freq = {};
  return {.layer = layer,
          .inv_freq = inv_freq,
          .magnitude = own ? 1.0f : config.rope_magnitude,  // the scaling is that of the others
          .interleaved = config.rope_interleaved,
          .axes = config.rope_axes};
}

Attend attend_of(const LayerWeights& w, const ModelConfig& config, int layer) {
  return {.layer = layer,
          .window = config.layer_windows[layer],
          .scale = config.attention_scale != 0.0f ? config.attention_scale
                                                  : 1.0f / std::sqrt(static_cast<float>(config.head_dim)),
          .sinks = w.attn_sinks.get(),
          .softcap = config.attention_softcap};
}

Projection project_of(const LayerWeights& w, const ModelConfig& config) {
  return {.linear = {w.attn_output.get(), w.attn_output_bias.get()},
          .norm_after = norm_of(config, w.attn_post_norm, w.attn_post_norm_bias),
          .scale = config.residual_scale};
}

Ffn ffn_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = norm_of(config, w.ffn_norm, w.ffn_norm_bias),
          .gate = {w.ffn_gate.get(), w.ffn_gate_bias.get()},
          .up = {w.ffn_up.get(), w.ffn_up_bias.get()},
          .down = {w.ffn_down.get(), w.ffn_down_bias.get()},
          .activation = config.ffn_activation,
          .norm_after = norm_of(config, w.ffn_post_norm, w.ffn_post_norm_bias),
          .scale = config.residual_scale};
}

Route route_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = norm_of(config, w.ffn_norm, w.ffn_norm_bias),
          .router = {w.router.get(), w.router_bias.get()},
          .experts_per_token = config.experts_per_token,
          .weighting = config.expert_weighting,
          .scale = config.expert_scale,
          .choice_bias = w.choice_bias.get(),
          .groups = config.expert_groups,
          .groups_chosen = config.expert_groups_chosen};
}

Experts experts_of(const LayerWeights& w, const ModelConfig& config) {
  return {.gate = {w.gate_experts.get(), w.gate_experts_bias.get()},
          .up = {w.up_experts.get(), w.up_experts_bias.get()},
          .down = {w.down_experts.get(), w.down_experts_bias.get()},
          .activation = config.expert_activation,
          .alpha = config.swiglu_alpha,
          .limit = config.swiglu_limit,
          .shared = {.gate = {w.shared_gate.get()},
                     .up = {w.shared_up.get()},
                     .down = {w.shared_down.get()},
                     .mix = {w.shared_mix.get()}}};
}

void feed_forward_or_experts(Executor& x, const LayerWeights& w, const ModelConfig& config, int layer) {
  if (config.is_dense(layer)) return x.ffn_add(ffn_of(w, config));
  x.route(route_of(w, config));
  x.experts_add(experts_of(w, config));
}

}  // namespace millrace
