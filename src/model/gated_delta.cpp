#include "model/gated_delta.h"

#include <fmt/core.h>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

using S = StateLayerWeights;

constexpr std::string_view kStateLayers =
    "attention.recurrent_layers";  // a flag for each, those that draft too

// config.json's layer_types or GGUF's flags; or all but every n-th.
void read_state_layers(const ConfigReader& reader, ModelConfig& config) {
  const int32_t every = reader.integer_or("full_attention_interval", "full_attention_interval", 1, 1024, 4);
  if (!reader.is_gguf() && read_hf_state_layers(reader, config, {"linear_attention"}, {"full_attention"},
                                                "linear_attention or full_attention"))
    return;
  config.state_layers.assign(static_cast<size_t>(config.layers), false);
  const io::GgufArray* flags =
      reader.is_gguf()
          ? reader.checkpoint().gguf->get_array(fmt::format("{}.{}", config.architecture, kStateLayers))
          : nullptr;
  if (flags != nullptr) {
    if (flags->integers.size() < static_cast<size_t>(config.layers))
      reader.fail(kStateLayers, fmt::format("{} entries", flags->integers.size()),
                  fmt::format("{}", config.layers));
    for (size_t l = 0; l < config.state_layers.size(); ++l) config.state_layers[l] = flags->integers[l] != 0;
    return;
  }
  for (int32_t l = 0; l < config.layers; ++l)
    config.state_layers[static_cast<size_t>(l)] = (l + 1) % every != 0;
}

void read_state_shape(const ConfigReader& reader, StateShape& s) {
  s.key_heads = reader.integer("ssm.group_count", "linear_num_key_heads", 1, 1024);
  s.value_heads = reader.integer("ssm.time_step_rank", "linear_num_value_heads", 1, 1024);
  s.key_dim = reader.integer("ssm.state_size", "linear_key_head_dim", 1, 1024);
  s.taps = reader.integer("ssm.conv_kernel", "linear_conv_kernel_dim", 1, kMaxTaps);
  if (s.value_heads % s.key_heads != 0)
    reader.fail("value heads of linear attention", fmt::format("{}", s.value_heads),
                fmt::format("a multiple of {} key heads", s.key_heads));
  if (reader.is_gguf()) {
    const int32_t inner = reader.integer("ssm.inner_size", "", 1, 1 << 20);
    if (inner % s.value_heads != 0 || inner / s.value_heads > 1024)
      reader.fail("ssm.inner_size", fmt::format("{}", inner),
                  fmt::format("a multiple of {} heads of at most 1024", s.value_heads));
    s.value_dim = inner / s.value_heads;
  } else {
    s.value_dim = reader.integer("", "linear_value_head_dim", 1, 1024);
  }
  s.projected = static_cast<int32_t>(s.mix_cols());
}

NormMix fused_mix(const S& w, const ModelConfig& config) {
  const StateShape& s = config.state;
  const int32_t per_key = s.value_heads / s.key_heads, values = per_key * s.value_dim;
  const int32_t group = 2 * s.key_dim + 2 * values, all = group * s.key_heads;
  return {.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
          .in = {Linear{w.ssm_in.get()}, Linear{w.ssm_ba.get()}},
          .query = {0, s.key_heads, s.key_dim, 1, group},
          .key = {s.key_dim, s.key_heads, s.key_dim, 1, group},
          .value = {2 * s.key_dim, s.value_heads, s.value_dim, per_key, group},
          .gate = {2 * s.key_dim + values, s.value_heads, s.value_dim, per_key, group},
          .step = {all + per_key, s.value_heads, 1, per_key, 2 * per_key},
          .beta = {all, s.value_heads, 1, per_key, 2 * per_key}};
}

// Queries, keys, values and the gate as they are used; beta and step in one matrix or in two.
NormMix plain_mix(const S& w, const ModelConfig& config) {
  const StateShape& s = config.state;
  const auto keys = static_cast<int32_t>(s.keys()), values = static_cast<int32_t>(s.values());
  const int32_t ba = 2 * keys + 2 * values, per_key = s.value_heads / s.key_heads;
  NormMix op{.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
             .in = {Linear{w.attn_qkv.get()}, Linear{w.attn_gate.get()}},
             .query = HeadColumns::plain(0, s.key_heads, s.key_dim),
             .key = HeadColumns::plain(keys, s.key_heads, s.key_dim),
             .value = HeadColumns::plain(2 * keys, s.value_heads, s.value_dim),
             .gate = HeadColumns::plain(2 * keys + values, s.value_heads, s.value_dim),
             .step = {},
             .beta = {}};
  if (w.ssm_ba != nullptr) {
    op.in[2].weight = w.ssm_ba.get();
    op.beta = {ba, s.value_heads, 1, per_key, 2 * per_key};
    op.step = {ba + per_key, s.value_heads, 1, per_key, 2 * per_key};
  } else {
    op.in[2].weight = w.ssm_beta.get();
    op.in[3].weight = w.ssm_alpha.get();
    op.beta = HeadColumns::plain(ba, s.value_heads, 1);
    op.step = HeadColumns::plain(ba + s.value_heads, s.value_heads, 1);
  }
  return op;
}

WeightSpec with_presence(WeightSpec spec, Presence presence) {
  spec.presence = presence;
  return spec;
}

// The order that files of llama.cpp have value heads in.
void tile_heads(std::vector<WeightSpec>& weights, const StateShape& s) {
  const int64_t before = 2 * s.keys();  // queries and keys
  for (WeightSpec& spec : weights) {
    HeadTiles tiles{
        .first = 0, .key_heads = s.key_heads, .per_key = s.value_heads / s.key_heads, .dim = s.value_dim};
    if (spec.role == "attn_qkv.weight" || spec.role == "ssm_conv1d.weight") {
      tiles.first = before;
    } else if (spec.role == "ssm_out.weight") {
      tiles.columns = true;
    } else if (spec.role == "ssm_dt.bias" || spec.role == "ssm_a") {
      tiles.dim = 1;
      tiles.columns = true;
    } else if (spec.role == "ssm_beta.weight" || spec.role == "ssm_alpha.weight") {
      tiles.dim = 1;
    } else if (spec.role != "attn_gate.weight") {
      continue;
    }
    spec.hf_tiles = tiles;
  }
}

void add_delta_net(std::vector<WeightSpec>& to, const ModelConfig& c, bool fused) {
  const StateShape& s = c.state;
  const int64_t hidden = c.hidden;
  to.push_back(norm_weight("attn_norm.weight", "input_layernorm.weight", hidden, &LayerWeights::attn_norm));
  if (fused) {
    // Files of llama.cpp have it in two, sorted by kind.
    to.push_back(with_presence(matrix_weight("ssm_in.weight", "linear_attn.in_proj_qkvz.weight",
                                             2 * s.keys() + 2 * s.values(), hidden, own_weight(&S::ssm_in)),
                               Presence::kUsual));
    to.push_back(
        with_presence(matrix_weight("attn_qkv.weight", "", s.channels(), hidden, own_weight(&S::attn_qkv)),
                      Presence::kRare));
    to.push_back(
        with_presence(matrix_weight("attn_gate.weight", "", s.values(), hidden, own_weight(&S::attn_gate)),
                      Presence::kRare));
    to.push_back(matrix_weight("ssm_ba.weight", "linear_attn.in_proj_ba.weight", 2 * int64_t{s.value_heads},
                               hidden, own_weight(&S::ssm_ba)));
  } else {
    to.push_back(matrix_weight("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", s.channels(), hidden,
                               own_weight(&S::attn_qkv)));
    to.push_back(matrix_weight("attn_gate.weight", "linear_attn.in_proj_z.weight", s.values(), hidden,
                               own_weight(&S::attn_gate)));
    to.push_back(matrix_weight("ssm_beta.weight", "linear_attn.in_proj_b.weight", s.value_heads, hidden,
                               own_weight(&S::ssm_beta)));
    to.push_back(matrix_weight("ssm_alpha.weight", "linear_attn.in_proj_a.weight", s.value_heads, hidden,
                               own_weight(&S::ssm_alpha)));
  }
  to.push_back(bias_weight("ssm_conv1d.weight", "linear_attn.conv1d.weight", {s.channels(), s.taps},
                           own_weight(&S::ssm_conv1d), Presence::kRequired));
  to.back().spread = 0.5;
  to.push_back(bias_weight("ssm_dt.bias", "linear_attn.dt_bias", {s.value_heads}, own_weight(&S::ssm_dt_bias),
                           Presence::kRequired));
  to.push_back(
      bias_weight("ssm_a", "linear_attn.A_log", {s.value_heads}, own_weight(&S::ssm_a), Presence::kRequired));
  to.back().hf_negative_log = true;
  to.back().spread = 0.0;
  to.back().synthetic = -0.5f;
  to.push_back(
      norm_weight("ssm_norm.weight", "linear_attn.norm.weight", s.value_dim, own_weight(&S::ssm_norm)));
  to.push_back(matrix_weight("ssm_out.weight", "linear_attn.out_proj.weight", hidden, s.values(),
                             own_weight(&S::ssm_out)));
}

}  // namespace

void GatedDeltaDecoder::settle_hf(nlohmann::json& config) const {
  if (!config.contains("partial_rotary_factor")) config["partial_rotary_factor"] = 0.25;
}

void GatedDeltaDecoder::read_config(const ConfigReader& reader, ModelConfig& config) const {
  read_decoder(reader, config);
  // Files of llama.cpp count the layers that draft.
  const int32_t drafting = reader.integer_or("nextn_predict_layers", "", 0, config.layers - 1, 0);
  config.layers -= drafting;
  config.layer_windows.resize(static_cast<size_t>(config.layers));
  if (reader.flag_or("", "attention_bias", false))
    reader.fail("config.json: attention_bias", "true", "false");
  if (has_experts()) {
    read_expert_sizes(reader, config, "num_experts");
    config.shared_ffn =
        reader.integer("expert_shared_feed_forward_length", "shared_expert_intermediate_size", 1, 1 << 20);
    config.expert_weighting = reader.flag_or("expert_weights_norm", "norm_topk_prob", true)
                                  ? Route::Weighting::kSoftmaxAllRenormalized
                                  : Route::Weighting::kSoftmaxAll;
    read_qwen_expert_layers(reader, config);
  } else {
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
  }
  config.gated_attention = true;
  read_state_layers(reader, config);
  read_state_shape(reader, config.state);
  config.state.tiled = reader.is_gguf() && tiled_in_gguf();
  if (!reader.is_gguf()) config.rotary_dims = hf_rotary_dims(reader, config.head_dim);
  read_rope(reader, config);
}

void GatedDeltaDecoder::write_keys(GgufKeys& keys) const {
  const ModelConfig& c = keys.config();
  const StateShape& s = c.state;
  const int32_t every = keys.reader().integer_or("", "full_attention_interval", 1, 1024, 4);
  bool usual = true;
  for (int32_t l = 0; l < c.layers; ++l) usual = usual && c.has_state(l) == ((l + 1) % every != 0);
  if (!usual) keys.flags(kStateLayers, c.state_layers);
  write_sizes(keys, has_experts()
                        ? keys.reader().integer_or("", "intermediate_size", 1, 1 << 20, c.expert_ffn)
                        : c.ffn);
  write_norm(keys);
  write_rope(keys);
  keys.size("rope.dimension_count", c.rotary_dims);
  if (has_experts()) {
    write_experts(keys);
    keys.size("expert_shared_feed_forward_length", c.shared_ffn);
    if (c.expert_weighting == Route::Weighting::kSoftmaxAll) keys.flag("expert_weights_norm", false);
  }
  keys.size("full_attention_interval", every);
  keys.size("ssm.conv_kernel", s.taps);
  keys.size("ssm.state_size", s.key_dim);
  keys.size("ssm.group_count", s.key_heads);
  keys.size("ssm.time_step_rank", s.value_heads);
  keys.size("ssm.inner_size", s.values());
}

std::vector<WeightSpec> GatedDeltaDecoder::layer_weights(const ModelConfig& config, int layer) const {
  std::vector<WeightSpec> weights;
  if (config.has_state(layer)) {
    add_delta_net(weights, config, fused_inputs());
    if (config.state.tiled) tile_heads(weights, config.state);
  } else {
    add_attention(weights, config, {.qk_norm = true});
    for (WeightSpec& spec : weights) {
      if (spec.role == "attn_q.weight") spec.shape[0] *= 2;
    }
  }
  weights.push_back(norm_weight("post_attention_norm.weight", "post_attention_layernorm.weight",
                                config.hidden, &LayerWeights::ffn_norm));
  for (WeightSpec& spec : weights) {
    if (spec.role.ends_with("norm.weight") && spec.role != "ssm_norm.weight") spec.hf_offset = 1.0f;
  }
  if (!has_experts() || config.is_dense(layer)) {
    add_feed_forward(weights, config);
    return weights;
  }
  add_experts(weights, config, usual_experts(config));
  add_mixed_shared_expert(weights, config);
  return weights;
}

void GatedDeltaDecoder::layer(Executor& x, const LayerWeights& w, const ModelConfig& config,
                              int index) const {
  if (config.has_state(index)) {
    const auto& own = static_cast<const S&>(w);
    if (own.ssm_in == nullptr && (own.attn_qkv == nullptr || own.attn_gate == nullptr))
      throw_error(ErrorCode::kBadInput,
                  "layer {}: found neither ssm_in.weight nor attn_qkv.weight and attn_gate.weight", index);
    x.norm_mix(own.ssm_in != nullptr ? fused_mix(own, config) : plain_mix(own, config));
    x.mix({.layer = index,
           .kind = StateMix::Kind::kGatedDelta,
           .conv = own.ssm_conv1d.get(),
           .a = own.ssm_a.get(),
           .step_bias = own.ssm_dt_bias.get(),
           .norm = {own.ssm_norm.get(), config.norm_eps},
           .norm_size = config.state.value_dim,
           .norm_before_gate = true});
    x.project_add({.linear = {own.ssm_out.get()}});
  } else {
    NormQkv qkv = qkv_of(w, config);
    qkv.gated = true;
    x.norm_qkv(qkv);
    x.rope_append_kv(rope_of(config, index));
    Attend attend = attend_of(w, config, index);
    attend.gated = true;
    x.attend(attend);
    x.project_add(project_of(w, config));
  }
  if (!has_experts()) return x.ffn_add(ffn_of(w, config));
  feed_forward_or_experts(x, w, config, index);
}

SyntheticTokenizer GatedDeltaDecoder::synthetic_tokenizer(int32_t vocab) const {
  return chatml_tokenizer("qwen2", vocab);
}

}  // namespace millrace
