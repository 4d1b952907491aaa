#include "model/decoder_layer.h"

#include <cmath>

namespace millrace {

NormQkv qkv_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = {w.attn_norm.get(), config.norm_eps},
          .q = {w.attn_q.get(), w.attn_q_bias.get()},
          .k = {w.attn_k.get(), w.attn_k_bias.get()},
          .v = {w.attn_v.get(), w.attn_v_bias.get()},
          .q_norm = {w.attn_q_norm.get(), config.norm_eps},
          .k_norm = {w.attn_k_norm.get(), config.norm_eps}};
}

Rope rope_of(const ModelConfig& config, int layer) {
  return {.layer = layer,
          .inv_freq = config.rope_inv_freq,
          .magnitude = config.rope_magnitude,
          .interleaved = config.rope_interleaved};
}

Attend attend_of(const LayerWeights& w, const ModelConfig& config, int layer) {
  return {.layer = layer,
          .window = config.layer_windows[layer],
          .scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim)),
          .sinks = w.attn_sinks.get()};
}

Ffn ffn_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = {w.ffn_norm.get(), config.norm_eps},
          .gate = {w.ffn_gate.get(), w.ffn_gate_bias.get()},
          .up = {w.ffn_up.get(), w.ffn_up_bias.get()},
          .down = {w.ffn_down.get(), w.ffn_down_bias.get()}};
}

Route route_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = {w.ffn_norm.get(), config.norm_eps},
          .router = {w.router.get(), w.router_bias.get()},
          .experts_per_token = config.experts_per_token,
          .weighting = config.expert_weighting};
}

Experts experts_of(const LayerWeights& w, const ModelConfig& config) {
  return {.gate = {w.gate_experts.get(), w.gate_experts_bias.get()},
          .up = {w.up_experts.get(), w.up_experts_bias.get()},
          .down = {w.down_experts.get(), w.down_experts_bias.get()},
          .activation = config.expert_activation,
          .alpha = config.swiglu_alpha,
          .limit = config.swiglu_limit};
}

}  // namespace millrace
