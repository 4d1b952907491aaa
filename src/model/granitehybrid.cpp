// Granite 4, the hybrids: layers of Mamba-2 and a few of attention without positions, Granite's multipliers,
// one feed-forward layer in each. Those with experts beside it are refused. IBM 2025, Dao and Gu 2024.
#include <fmt/core.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/gated_delta.h"
#include "model/rope.h"

namespace millrace {
namespace {

using S = StateLayerWeights;

class GraniteHybrid final : public Architecture {
 public:
  std::string_view name() const override { return "granitehybrid"; }
  std::vector<std::string_view> model_types() const override { return {"granitemoehybrid"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
      "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
      "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
      "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": true,
      "mamba_proj_bias": false})";
  }
  // Published files name the kinds of layers otherwise than transformers does now.
  void settle_hf(nlohmann::json& config) const override {
    if (config.contains("layers_block_type") && !config.contains("layer_types"))
      config["layer_types"] = config["layers_block_type"];
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    if (reader.integer_or("expert_count", "num_local_experts", 0, 4096, 0) > 0)
      throw_error(ErrorCode::kUnsupported,
                  "{}: found a Granite hybrid with experts, expected one without: not done yet",
                  reader.checkpoint().path());
    read_sizes_of(reader, config);
    config.ffn = reader.integer("feed_forward_length", "shared_intermediate_size", 1, 1 << 20);
    read_mamba(reader, config.state, config.hidden);
    config.own["norm_groups"] = reader.is_gguf() ? static_cast<float>(config.state.key_heads) : 1.0f;
    const auto multiplier = [&](const char* gguf, const char* hf, double usual) {
      const double value = reader.real_or(gguf, hf, usual);
      if (!(value > 0)) reader.fail(hf, fmt::format("{}", value), "above 0");
      return value;
    };
    config.embedding_scale = static_cast<float>(multiplier("embedding_scale", "embedding_multiplier", 1.0));
    config.residual_scale = static_cast<float>(multiplier("residual_scale", "residual_multiplier", 1.0));
    config.logit_scale = static_cast<float>(1.0 / multiplier("logit_scale", "logits_scaling", 1.0));
    const double usual = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
    config.attention_scale = static_cast<float>(multiplier("attention.scale", "attention_multiplier", usual));
    config.rope_interleaved = reader.is_gguf();
    read_rope(reader, config);
    if (!has_rope(reader)) config.unrotated_layers.assign(static_cast<size_t>(config.layers), true);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    const StateShape& s = c.state;
    if (s.key_heads != 1)
      throw_error(ErrorCode::kUnsupported,
                  "{}: mamba_n_groups: found {}, expected 1 to write a GGUF file, whose "
                  "norms are of groups",
                  keys.reader().checkpoint().path(), s.key_heads);
    if (has_limits(keys.reader()))
      throw_error(ErrorCode::kUnsupported, "{}: time_step_limit: found limits, for which GGUF has no key",
                  keys.reader().checkpoint().path());
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    keys.size("feed_forward_length", c.ffn);
    keys.size("attention.head_count", c.heads);
    keys.size("attention.key_length", c.head_dim);
    keys.size("attention.value_length", c.head_dim);
    keys.size("vocab_size", c.vocab);
    std::vector<int32_t> heads;
    for (int32_t l = 0; l < c.layers; ++l) heads.push_back(c.has_state(l) ? 0 : c.kv_heads);
    keys.sizes("attention.head_count_kv", heads);
    keys.size("rope.dimension_count", c.rotary_dims);
    keys.flag("rope.scaling.finetuned", has_rope(keys.reader()));
    write_norm(keys);
    write_rope(keys);
    keys.size("ssm.conv_kernel", s.taps);
    keys.size("ssm.state_size", s.key_dim);
    keys.size("ssm.group_count", s.key_heads);
    keys.size("ssm.time_step_rank", s.value_heads);
    keys.size("ssm.inner_size", s.values());
    keys.real("embedding_scale", c.embedding_scale);
    keys.real("residual_scale", c.residual_scale);
    keys.real("logit_scale", keys.reader().real_or("", "logits_scaling", 1.0));
    keys.real("attention.scale", c.attention_scale);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int layer) const override {
    std::vector<WeightSpec> weights;
    if (c.has_state(layer)) {
      add_mamba(weights, c);
    } else {
      add_attention(weights, c, {.interleaved_in_gguf = true});
    }
    weights.push_back(ffn_norm_weight(c));
    add_feed_forward(weights, c,
                     {.gate = "shared_mlp.gate_linear.weight",
                      .up = "shared_mlp.up_linear.weight",
                      .down = "shared_mlp.output_linear.weight"});
    for (WeightSpec& spec : weights) {
      constexpr std::string_view kBoth = "shared_mlp.input_linear.weight";
      if (spec.role == "ffn_gate.weight")
        spec.part_of = PartOf{.hf = kBoth, .first_row = 0, .all_rows = 2 * c.ffn};
      if (spec.role == "ffn_up.weight")
        spec.part_of = PartOf{.hf = kBoth, .first_row = c.ffn, .all_rows = 2 * c.ffn};
    }
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<S>(); }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    if (config.has_state(index)) {
      mamba(x, static_cast<const S&>(w), config, index);
    } else {
      x.norm_qkv(qkv_of(w, config));
      x.rope_append_kv(rope_of(config, index));
      x.attend(attend_of(w, config, index));
      x.project_add(project_of(w, config));
    }
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"granite4-h-micro",
             R"({"model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 2048,
      "shared_intermediate_size": 8192, "num_local_experts": 0, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 100352, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
      "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
      "attention_multiplier": 0.015625, "mamba_n_heads": 64, "mamba_d_state": 128, "mamba_d_head": 64,
      "position_embedding_type": "nope", "tie_word_embeddings": true, "layer_types": ["mamba", "mamba", "mamba",
      "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
      "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
      "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention",
      "mamba", "mamba", "mamba", "mamba"]})"},
            {"tiny-granitehybrid",
             R"({"model_type": "granitemoehybrid", "num_hidden_layers": 3, "hidden_size": 64,
      "shared_intermediate_size": 128, "num_local_experts": 0, "num_attention_heads": 4,
      "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
      "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.3,
      "attention_multiplier": 0.125, "mamba_n_heads": 4, "mamba_d_state": 32, "mamba_d_head": 32,
      "position_embedding_type": "nope", "tie_word_embeddings": true,
      "layer_types": ["mamba", "attention", "mamba"]})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 private:
  static bool has_rope(const ConfigReader& reader) {
    if (reader.is_gguf()) return reader.flag_or("rope.scaling.finetuned", "", true);
    const auto type = reader.hf().find("position_embedding_type");
    return type != reader.hf().end() && *type == "rope";
  }

  // [low, high] in config.json; null, or 0 and infinity, for none.
  static bool has_limits(const ConfigReader& reader) {
    if (reader.is_gguf()) return false;
    const auto limit = reader.hf().find("time_step_limit");
    if (limit == reader.hf().end() || !limit->is_array() || limit->size() != 2) return false;
    const bool open = !(*limit)[1].is_number() || std::isinf((*limit)[1].get<double>());
    return !(open && (*limit)[0].is_number() && (*limit)[0].get<double>() == 0.0);
  }

  static void read_sizes_of(const ConfigReader& reader, ModelConfig& config) {
    config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
    config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
    config.heads = reader.integer("attention.head_count", "num_attention_heads", 1, 1024);
    config.context_length = reader.integer("context_length", "max_position_embeddings", 1, 1 << 28);
    config.layer_windows.assign(static_cast<size_t>(config.layers), 0);
    config.norm_eps =
        static_cast<float>(reader.real_or("attention.layer_norm_rms_epsilon", "rms_norm_eps", 1e-5));
    if (!(config.norm_eps > 0))
      reader.fail("rms norm epsilon", fmt::format("{}", config.norm_eps), "above 0");
    if (reader.is_gguf()) {
      read_gguf_layers(reader, config);
    } else {
      config.kv_heads = reader.integer_or("", "num_key_value_heads", 1, 1024, config.heads);
      read_hf_layers(reader, config);
      if (has_limits(reader)) {
        const auto& limit = reader.hf().at("time_step_limit");
        if (!limit[0].is_number()) reader.fail("config.json: time_step_limit", limit.dump(), "two numbers");
        config.own["step_min"] = limit[0].get<float>();
        config.own["step_max"] =
            limit[1].is_number() ? limit[1].get<float>() : std::numeric_limits<float>::infinity();
      }
    }
    if (config.kv_heads == 0) config.kv_heads = config.heads;
    config.head_dim =
        reader.integer_or("attention.key_length", "head_dim", 1, 1024, config.hidden / config.heads);
    if (config.heads % config.kv_heads != 0)
      reader.fail("attention heads", fmt::format("{}", config.heads),
                  fmt::format("a multiple of {} key/value heads", config.kv_heads));
  }

  static void read_gguf_layers(const ConfigReader& reader, ModelConfig& config) {
    const std::string key = config.architecture + ".attention.head_count_kv";
    const io::GgufArray* heads = reader.checkpoint().gguf->get_array(key);
    if (heads == nullptr || heads->integers.size() != static_cast<size_t>(config.layers))
      reader.fail(key, heads == nullptr ? "nothing" : fmt::format("{} entries", heads->integers.size()),
                  fmt::format("a list of {}", config.layers));
    for (const int64_t kv : heads->integers) {
      config.state_layers.push_back(kv == 0);
      if (kv == 0) continue;
      if (kv < 0 || kv > 1024 || (config.kv_heads != 0 && kv != config.kv_heads))
        reader.fail(key, fmt::format("{}", kv), "0 or one number of heads for all layers of attention");
      config.kv_heads = static_cast<int32_t>(kv);
    }
  }

  static void read_hf_layers(const ConfigReader& reader, ModelConfig& config) {
    config.state_layers.assign(static_cast<size_t>(config.layers), true);
    const auto types = reader.hf().find("layer_types");
    if (types == reader.hf().end() || types->is_null()) return;
    if (!types->is_array() || types->size() != static_cast<size_t>(config.layers))
      reader.fail("config.json: layer_types",
                  types->is_array() ? fmt::format("{} entries", types->size()) : "no list",
                  fmt::format("{}", config.layers));
    for (int32_t l = 0; l < config.layers; ++l) {
      const nlohmann::json& type = (*types)[static_cast<size_t>(l)];
      const bool state = type == "mamba" || type == "linear_attention";
      if (!state && type != "attention" && type != "full_attention")
        reader.fail(fmt::format("config.json: layer_types[{}]", l), type.dump(), "mamba or attention");
      config.state_layers[static_cast<size_t>(l)] = state;
    }
  }

  static void read_mamba(const ConfigReader& reader, StateShape& s, int32_t hidden) {
    s.key_heads = reader.integer("ssm.group_count", "mamba_n_groups", 1, 1024);
    s.value_heads = reader.integer("ssm.time_step_rank", "mamba_n_heads", 1, 4096);
    s.key_dim = reader.integer("ssm.state_size", "mamba_d_state", 1, 4096);
    s.taps = reader.integer("ssm.conv_kernel", "mamba_d_conv", 1, kMaxTaps);
    const int64_t inner = reader.is_gguf() ? reader.integer("ssm.inner_size", "", 1, 1 << 24)
                                           : int64_t{hidden} * reader.integer("", "mamba_expand", 1, 64);
    if (inner % s.value_heads != 0 || s.value_heads % s.key_heads != 0 || inner / s.value_heads > 4096)
      reader.fail("heads of Mamba-2",
                  fmt::format("{} of {} columns, {} groups", s.value_heads, inner, s.key_heads),
                  "whole heads of at most 4096, whole groups");
    s.value_dim = static_cast<int32_t>(inner / s.value_heads);
    if (!reader.is_gguf()) {
      const auto head = reader.hf().find("mamba_d_head");
      if (head != reader.hf().end() && head->is_number() && head->get<double>() != s.value_dim)
        reader.fail("config.json: mamba_d_head", head->dump(), fmt::format("{}", s.value_dim));
    }
    s.values_first = true;
    s.projected = static_cast<int32_t>(s.mix_cols());
  }

  static void add_mamba(std::vector<WeightSpec>& to, const ModelConfig& c) {
    const StateShape& s = c.state;
    const int64_t hidden = c.hidden, heads = s.value_heads;
    const int64_t in = s.channels() + s.values() + heads;
    to.push_back(norm_weight("attn_norm.weight", "input_layernorm.weight", hidden, &LayerWeights::attn_norm));
    to.push_back(matrix_weight("ssm_in.weight", "mamba.in_proj.weight", in, hidden, own_weight(&S::ssm_in)));
    to.push_back(bias_weight("ssm_conv1d.weight", "mamba.conv1d.weight", {s.channels(), s.taps},
                             own_weight(&S::ssm_conv1d), Presence::kRequired));
    to.back().spread = 0.5;
    to.push_back(bias_weight("ssm_conv1d.bias", "mamba.conv1d.bias", {s.channels()},
                             own_weight(&S::ssm_conv1d_bias), Presence::kUsual));
    to.push_back(bias_weight("ssm_dt.bias", "mamba.dt_bias", {heads}, own_weight(&S::ssm_dt_bias),
                             Presence::kRequired));
    to.push_back(bias_weight("ssm_a", "mamba.A_log", {heads}, own_weight(&S::ssm_a), Presence::kRequired));
    to.back().hf_negative_log = true;
    to.back().spread = 0.0;
    to.back().synthetic = -0.5f;
    to.push_back(bias_weight("ssm_d", "mamba.D", {heads}, own_weight(&S::ssm_d), Presence::kRequired));
    to.push_back(norm_weight("ssm_norm.weight", "mamba.norm.weight", s.values(), own_weight(&S::ssm_norm)));
    to.push_back(matrix_weight("ssm_out.weight", "mamba.out_proj.weight", hidden, s.values(),
                               own_weight(&S::ssm_out)));
    to.push_back(
        bias_weight("ssm_in.bias", "mamba.in_proj.bias", {in}, own_weight(&S::ssm_ba), Presence::kRare));
    to.push_back(bias_weight("ssm_out.bias", "mamba.out_proj.bias", {hidden}, own_weight(&S::ssm_out_bias),
                             Presence::kRare));
  }

  // A row of the product is gate, x, B, C, dt. To StateShape x are the values, B the keys, C the queries.
  static void mamba(Executor& x, const S& w, const ModelConfig& config, int index) {
    const StateShape& s = config.state;
    const auto keys = static_cast<int32_t>(s.keys()), values = static_cast<int32_t>(s.values());
    x.norm_mix({.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
                .in = {Linear{w.ssm_in.get(), w.ssm_ba.get()}},
                .query = HeadColumns::plain(2 * values + keys, s.key_heads, s.key_dim),
                .key = HeadColumns::plain(2 * values, s.key_heads, s.key_dim),
                .value = HeadColumns::plain(values, s.value_heads, s.value_dim),
                .gate = HeadColumns::plain(0, s.value_heads, s.value_dim),
                .step = HeadColumns::plain(2 * values + 2 * keys, s.value_heads, 1),
                .beta = {}});
    const auto limit = [&](const char* name, float usual) {
      const auto found = config.own.find(name);
      return found == config.own.end() ? usual : found->second;
    };
    x.mix({.layer = index,
           .kind = StateMix::Kind::kSelectiveScan,
           .conv = w.ssm_conv1d.get(),
           .conv_bias = w.ssm_conv1d_bias.get(),
           .a = w.ssm_a.get(),
           .step_bias = w.ssm_dt_bias.get(),
           .d = w.ssm_d.get(),
           .step_min = limit("step_min", 0.0f),
           .step_max = limit("step_max", std::numeric_limits<float>::infinity()),
           .norm = {w.ssm_norm.get(), config.norm_eps},
           .norm_size = static_cast<int32_t>(s.values() / static_cast<int64_t>(config.own.at("norm_groups"))),
           .norm_before_gate = false});
    x.project_add({.linear = {w.ssm_out.get(), w.ssm_out_bias.get()}, .scale = config.residual_scale});
  }
};

const GraniteHybrid kGraniteHybridObject{};

}  // namespace

const Architecture& kGraniteHybrid = kGraniteHybridObject;

}  // namespace millrace
