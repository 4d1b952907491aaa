#include "model/mamba_layer.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"

namespace millrace {
namespace {

using S = StateLayerWeights;

// [low, high] in config.json; null, or 0 and infinity, for none.
bool has_limits(const ConfigReader& reader) {
  if (reader.is_gguf()) return false;
  const auto limit = reader.hf().find("time_step_limit");
  if (limit == reader.hf().end() || !limit->is_array() || limit->size() != 2) return false;
  const bool open = !(*limit)[1].is_number() || std::isinf((*limit)[1].get<double>());
  return !(open && (*limit)[0].is_number() && (*limit)[0].get<double>() == 0.0);
}

void read_limits(const ConfigReader& reader, ModelConfig& config) {
  if (!has_limits(reader)) return;
  const auto& limit = reader.hf().at("time_step_limit");
  if (!limit[0].is_number()) reader.fail("config.json: time_step_limit", limit.dump(), "two numbers");
  config.own["step_min"] = limit[0].get<float>();
  config.own["step_max"] =
      limit[1].is_number() ? limit[1].get<float>() : std::numeric_limits<float>::infinity();
}

int64_t read_inner(const ConfigReader& reader, const MambaFields& fields, int32_t heads, int32_t hidden) {
  if (reader.is_gguf()) return reader.integer("ssm.inner_size", "", 1, 1 << 24);
  if (!fields.inner.empty()) {
    const int32_t inner = reader.integer_or("", fields.inner, 1, 1 << 24, 0);
    if (inner > 0) return inner;
  }
  if (!fields.expand.empty()) return int64_t{hidden} * reader.integer("", fields.expand, 1, 64);
  return int64_t{heads} * reader.integer("", fields.head_dim, 1, 4096);
}

}  // namespace

void read_mamba(const ConfigReader& reader, const MambaFields& fields, bool hf_norm_groups,
                ModelConfig& config) {
  StateShape& s = config.state;
  s.key_heads = reader.integer("ssm.group_count", fields.groups, 1, 1024);
  s.value_heads = reader.integer("ssm.time_step_rank", fields.heads, 1, 4096);
  s.key_dim = reader.integer("ssm.state_size", fields.states, 1, 4096);
  s.taps = reader.integer("ssm.conv_kernel", fields.taps, 1, kMaxTaps);
  const int64_t inner = read_inner(reader, fields, s.value_heads, config.hidden);
  if (inner % s.value_heads != 0 || s.value_heads % s.key_heads != 0 || inner / s.value_heads > 4096)
    reader.fail("heads of Mamba-2",
                fmt::format("{} of {} columns, {} groups", s.value_heads, inner, s.key_heads),
                "whole heads of at most 4096, whole groups");
  s.value_dim = static_cast<int32_t>(inner / s.value_heads);
  if (!reader.is_gguf()) {
    const auto head = reader.hf().find(fields.head_dim);
    if (head != reader.hf().end() && head->is_number() && head->get<double>() != s.value_dim)
      reader.fail(fmt::format("config.json: {}", fields.head_dim), head->dump(),
                  fmt::format("{}", s.value_dim));
  }
  s.values_first = true;
  s.projected = static_cast<int32_t>(s.mix_cols());
  config.own["norm_groups"] = reader.is_gguf() || hf_norm_groups ? static_cast<float>(s.key_heads) : 1.0f;
  read_limits(reader, config);
}

void write_mamba_sizes(GgufKeys& keys) {
  const ModelConfig& c = keys.config();
  const StateShape& s = c.state;
  if (c.own.at("norm_groups") != static_cast<float>(s.key_heads))
    throw_error(ErrorCode::kUnsupported,
                "{}: mamba_n_groups: found {}, expected 1 to write a GGUF file, whose norms are of groups",
                keys.reader().checkpoint().path(), s.key_heads);
  keys.size("ssm.conv_kernel", s.taps);
  keys.size("ssm.state_size", s.key_dim);
  keys.size("ssm.group_count", s.key_heads);
  keys.size("ssm.time_step_rank", s.value_heads);
  keys.size("ssm.inner_size", s.values());
}

void write_mamba(GgufKeys& keys) {
  if (has_limits(keys.reader()))
    throw_error(ErrorCode::kUnsupported, "{}: time_step_limit: found limits, for which GGUF has no key",
                keys.reader().checkpoint().path());
  write_mamba_sizes(keys);
}

std::vector<bool> read_attending_layers(const ConfigReader& reader, ModelConfig& config) {
  const std::string key = config.architecture + ".attention.head_count_kv";
  const io::GgufArray* heads = reader.checkpoint().gguf->get_array(key);
  if (heads == nullptr || heads->integers.size() != static_cast<size_t>(config.layers))
    reader.fail(key, heads == nullptr ? "nothing" : fmt::format("{} entries", heads->integers.size()),
                fmt::format("a list of {}", config.layers));
  std::vector<bool> attends;
  for (const int64_t kv : heads->integers) {
    attends.push_back(kv != 0);
    if (kv == 0) continue;
    if (kv < 0 || kv > 1024 || (config.kv_heads != 0 && kv != config.kv_heads))
      reader.fail(key, fmt::format("{}", kv), "0 or one number of heads for all layers of attention");
    config.kv_heads = static_cast<int32_t>(kv);
  }
  return attends;
}

void write_attending_layers(GgufKeys& keys) {
  const ModelConfig& c = keys.config();
  std::vector<int32_t> heads;
  for (int32_t l = 0; l < c.layers; ++l) heads.push_back(c.has_state(l) || !c.keeps(l) ? 0 : c.kv_heads);
  keys.sizes("attention.head_count_kv", heads);
}

void add_mamba(std::vector<WeightSpec>& to, const ModelConfig& c, const MambaNames& names) {
  const StateShape& s = c.state;
  const int64_t hidden = c.hidden, heads = s.value_heads;
  const int64_t in = s.channels() + s.values() + heads;
  if (!names.before.empty())
    to.push_back(norm_weight("attn_norm.weight", names.before, hidden, &LayerWeights::attn_norm));
  to.push_back(matrix_weight("ssm_in.weight", names.in, in, hidden, own_weight(&S::ssm_in)));
  to.push_back(bias_weight("ssm_conv1d.weight", names.conv, {s.channels(), s.taps},
                           own_weight(&S::ssm_conv1d), Presence::kRequired));
  to.back().spread = 0.5;
  to.push_back(bias_weight("ssm_conv1d.bias", names.conv_bias, {s.channels()},
                           own_weight(&S::ssm_conv1d_bias), Presence::kUsual));
  to.push_back(
      bias_weight("ssm_dt.bias", names.dt_bias, {heads}, own_weight(&S::ssm_dt_bias), Presence::kRequired));
  to.push_back(bias_weight("ssm_a", names.a_log, {heads}, own_weight(&S::ssm_a), Presence::kRequired));
  to.back().hf_negative_log = true;
  to.back().spread = 0.0;
  to.back().synthetic = -0.5f;
  to.push_back(bias_weight("ssm_d", names.d, {heads}, own_weight(&S::ssm_d), Presence::kRequired));
  if (!names.norm.empty())
    to.push_back(norm_weight("ssm_norm.weight", names.norm, s.values(), own_weight(&S::ssm_norm)));
  to.push_back(matrix_weight("ssm_out.weight", names.out, hidden, s.values(), own_weight(&S::ssm_out)));
  to.push_back(bias_weight("ssm_in.bias", names.in_bias, {in}, own_weight(&S::ssm_ba), Presence::kRare));
  to.push_back(
      bias_weight("ssm_out.bias", names.out_bias, {hidden}, own_weight(&S::ssm_out_bias), Presence::kRare));
}

NormMix mamba_inputs(const S& w, const ModelConfig& config, const std::array<float, 5>& scales) {
  const StateShape& s = config.state;
  const auto keys = static_cast<int32_t>(s.keys()), values = static_cast<int32_t>(s.values());
  return {.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
          .in = {Linear{w.ssm_in.get(), w.ssm_ba.get()}},
          .query = HeadColumns::plain(2 * values + keys, s.key_heads, s.key_dim, scales[3]),
          .key = HeadColumns::plain(2 * values, s.key_heads, s.key_dim, scales[2]),
          .value = HeadColumns::plain(values, s.value_heads, s.value_dim, scales[1]),
          .gate = HeadColumns::plain(0, s.value_heads, s.value_dim, scales[0]),
          .step = HeadColumns::plain(2 * values + 2 * keys, s.value_heads, 1, scales[4]),
          .beta = {}};
}

StateMix mamba_mix(const S& w, const ModelConfig& config, int layer) {
  const auto own = [&](const char* name, float usual) {
    const auto found = config.own.find(name);
    return found == config.own.end() ? usual : found->second;
  };
  const auto groups = static_cast<int64_t>(config.own.at("norm_groups"));
  return {.layer = layer,
          .kind = StateMix::Kind::kSelectiveScan,
          .conv = w.ssm_conv1d.get(),
          .conv_bias = w.ssm_conv1d_bias.get(),
          .a = w.ssm_a.get(),
          .step_bias = w.ssm_dt_bias.get(),
          .d = w.ssm_d.get(),
          .step_min = own("step_min", 0.0f),
          .step_max = own("step_max", std::numeric_limits<float>::infinity()),
          .norm = {w.ssm_norm.get(), config.norm_eps},
          .norm_size = static_cast<int32_t>(config.state.values() / groups),
          .norm_before_gate = false};
}

void mamba_layer(Executor& x, const S& w, const ModelConfig& config, int layer) {
  x.norm_mix(mamba_inputs(w, config));
  x.mix(mamba_mix(w, config, layer));
  x.project_add({.linear = {w.ssm_out.get(), w.ssm_out_bias.get()}, .scale = config.residual_scale});
}

}  // namespace millrace
