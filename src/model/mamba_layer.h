// Layers of Mamba-2 (Dao and Gu 2024), which several hybrids have: their hyperparameters, weights and
// operations. The file's row of products is gate, x, B, C, dt; to StateShape x are the values, B the keys and
// C the queries.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "model/architecture.h"
#include "model/gated_delta.h"

namespace millrace {

// What config.json calls the sizes. An empty name: there is no such field.
struct MambaFields {
  std::string_view groups = "mamba_n_groups", heads = "mamba_n_heads", states = "mamba_d_state",
                   taps = "mamba_d_conv", head_dim = "mamba_d_head";
  std::string_view inner = {};               // all columns of x, where config.json says them
  std::string_view expand = "mamba_expand";  // else so many times the residual stream's
};

// Fills config.state, config.own["norm_groups"] (norms of groups of columns: always so in GGUF files) and,
// where config.json limits dt, config.own["step_min"] and ["step_max"].
void read_mamba(const ConfigReader& reader, const MambaFields& fields, bool hf_norm_groups,
                ModelConfig& config);
// GGUF's keys. The first refuses limits of dt, for which GGUF has none.
void write_mamba(GgufKeys& keys);
void write_mamba_sizes(GgufKeys& keys);

// A GGUF file's attention.head_count_kv, one for each layer, none of a layer without attention: sets
// kv_heads. [layers]: does it attend?
std::vector<bool> read_attending_layers(const ConfigReader& reader, ModelConfig& config);
void write_attending_layers(GgufKeys& keys);

// Hugging Face's names of a layer's weights.
struct MambaNames {
  std::string_view before, in, in_bias, conv, conv_bias, dt_bias, a_log, d, norm, out, out_bias;
};
inline constexpr MambaNames kMambaNames = {
    "input_layernorm.weight", "mamba.in_proj.weight",  "mamba.in_proj.bias", "mamba.conv1d.weight",
    "mamba.conv1d.bias",      "mamba.dt_bias",         "mamba.A_log",        "mamba.D",
    "mamba.norm.weight",      "mamba.out_proj.weight", "mamba.out_proj.bias"};
inline constexpr MambaNames kMixerNames = {
    "norm.weight",       "mixer.in_proj.weight",  "mixer.in_proj.bias", "mixer.conv1d.weight",
    "mixer.conv1d.bias", "mixer.dt_bias",         "mixer.A_log",        "mixer.D",
    "mixer.norm.weight", "mixer.out_proj.weight", "mixer.out_proj.bias"};
// The norm before it (unless `before` is empty) and all of them.
void add_mamba(std::vector<WeightSpec>& to, const ModelConfig& config, const MambaNames& names);

// scales: of gate, x, B, C, dt.
NormMix mamba_inputs(const StateLayerWeights& w, const ModelConfig& config,
                     const std::array<float, 5>& scales = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f});
StateMix mamba_mix(const StateLayerWeights& w, const ModelConfig& config, int layer);
// All of a layer that is nothing else.
void mamba_layer(Executor& x, const StateLayerWeights& w, const ModelConfig& config, int layer);

}  // namespace millrace
