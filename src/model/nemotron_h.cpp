// Nemotron H: a layer is one mixer, Mamba-2, attention without positions, a feed-forward layer of squared
// ReLUs without a gate or, in Nemotron 3, experts of that kind. NVIDIA 2025.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/mamba_layer.h"

namespace millrace {
namespace {

using S = StateLayerWeights;

constexpr MambaFields kNemotronFields = {.groups = "n_groups",
                                         .heads = "mamba_num_heads",
                                         .states = "ssm_state_size",
                                         .taps = "conv_kernel",
                                         .head_dim = "mamba_head_dim",
                                         .expand = {}};

bool names_experts(const nlohmann::json& config) {
  const auto types = config.find("layers_block_type");
  if (types != config.end() && types->is_array())
    return std::find(types->begin(), types->end(), "moe") != types->end();
  const auto pattern = config.find("hybrid_override_pattern");
  return pattern != config.end() && pattern->is_string() &&
         pattern->get<std::string>().find('E') != std::string::npos;
}

class NemotronH : public Architecture {
 public:
  std::string_view name() const override { return "nemotron_h"; }
  std::vector<std::string_view> model_types() const override { return {"nemotron_h"}; }
  bool claims(const nlohmann::json& config) const override { return !names_experts(config); }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
      "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_hidden_act": "relu2",
      "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
      "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "layer_norm_epsilon": 1e-5, "n_routed_experts": 8,
      "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2,
      "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
      "vocab_size": 131072})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"mamba_n_groups", "n_groups"},
            {"mamba_d_conv", "conv_kernel"},
            {"mamba_dt_min", "time_step_min"},
            {"layer_types", "layers_block_type"},
            {"num_local_experts", "n_routed_experts"}};
  }
  // Of the limits of dt the published class knows one only.
  void settle_hf(nlohmann::json& config) const override {
    config["time_step_limit"] = {config["time_step_min"], nullptr};
  }
  HfNames hf_names() const override {
    return {.embedding = "backbone.embeddings.weight",
            .output_norm = "backbone.norm_f.weight",
            .layers = "backbone.layers."};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
    config.heads = reader.integer("attention.head_count", "num_attention_heads", 1, 1024);
    config.head_dim = reader.integer("attention.key_length", "head_dim", 1, 1024);
    config.context_length = reader.integer("context_length", "max_position_embeddings", 1, 1 << 28);
    read_norm_eps(reader, config, "layer_norm_epsilon");
    config.ffn_activation = config.expert_activation = Activation::kReluSquared;
    if (reader.is_gguf()) {
      read_gguf_layers(reader, config);
    } else {
      read_hf_layers(reader, config);
    }
    if (config.kv_heads == 0) config.kv_heads = config.heads;
    check_heads(reader, config);
    config.layer_windows.assign(static_cast<size_t>(config.layers), 0);
    config.unrotated_layers.assign(static_cast<size_t>(config.layers), true);
    read_mamba(reader, kNemotronFields, /*hf_norm_groups=*/true, config);
    config.own.try_emplace("step_min", static_cast<float>(reader.real_or("ssm.time_step_min", "", 0.0)));
    config.own.try_emplace("step_max", std::numeric_limits<float>::infinity());
    if (has_experts()) read_experts(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    std::vector<int32_t> inner;
    for (int32_t l = 0; l < c.layers; ++l)
      inner.push_back(c.keeps(l) ? 0 : has_experts() ? c.expert_ffn : c.ffn);
    keys.sizes("feed_forward_length", inner);
    keys.size("attention.head_count", c.heads);
    keys.size("attention.key_length", c.head_dim);
    keys.size("attention.value_length", c.head_dim);
    keys.size("vocab_size", c.vocab);
    write_attending_layers(keys);
    write_norm(keys);
    write_mamba_sizes(keys);
    // A key of our own, for what other programs leave out.
    keys.real("ssm.time_step_min", c.own.at("step_min"));
    if (!has_experts()) return;
    write_experts(keys);
    keys.size("expert_shared_feed_forward_length", c.shared_ffn);
    keys.size("expert_shared_count", 1);
    keys.size("expert_gating_func", 2);
    keys.flag("expert_weights_norm", c.expert_weighting == Route::Weighting::kSigmoidRenormalized);
    keys.real("expert_weights_scale", c.expert_scale);
    keys.size("expert_group_count", c.expert_groups);
    keys.size("expert_group_used_count", c.expert_groups_chosen);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int layer) const override {
    std::vector<WeightSpec> weights;
    if (c.has_state(layer)) {
      add_mamba(weights, c, kMixerNames);
    } else if (c.keeps(layer)) {
      add_attention(weights, c, {});
      for (WeightSpec& spec : weights) {
        if (spec.role == "attn_norm.weight") spec.hf = "norm.weight";
        if (spec.role == "attn_q.weight") spec.hf = "mixer.q_proj.weight";
        if (spec.role == "attn_k.weight") spec.hf = "mixer.k_proj.weight";
        if (spec.role == "attn_v.weight") spec.hf = "mixer.v_proj.weight";
        if (spec.role == "attn_output.weight") spec.hf = "mixer.o_proj.weight";
        if (spec.role.ends_with(".bias")) spec.hf = {};
      }
    } else if (is_expert_layer(c, layer)) {
      add_expert_layer(weights, c);
    } else {
      add_plain_feed_forward(weights, c);
    }
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<S>(); }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    if (config.has_state(index)) return mamba_layer(x, static_cast<const S&>(w), config, index);
    if (config.keeps(index)) {
      x.norm_qkv(qkv_of(w, config));
      x.rope_append_kv(rope_of(config, index));
      x.attend(attend_of(w, config, index));
      return x.project_add(project_of(w, config));
    }
    if (!is_expert_layer(config, index)) return x.ffn_add(ffn_of(w, config));
    x.route(route_of(w, config));
    x.experts_add(experts_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"nemotron-h-8b", R"({"model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32,
      "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 131072,
      "max_position_embeddings": 8192, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
      "n_groups": 8, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"})"},
            {"tiny-nemotron-h", R"({"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "vocab_size": 640,
      "max_position_embeddings": 2048, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 32,
      "n_groups": 2, "hybrid_override_pattern": "M-*-"})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("tekken", vocab);
  }

 protected:
  virtual bool has_experts() const { return false; }

 private:
  // 'M' Mamba-2, '*' attention, '-' a feed-forward layer, 'E' experts.
  static std::string pattern_of(const ConfigReader& reader) {
    const auto types = reader.hf().find("layers_block_type");
    if (types != reader.hf().end() && types->is_array()) {
      std::string pattern;
      for (const nlohmann::json& type : *types) {
        if (type == "linear_attention" || type == "mamba") {
          pattern += 'M';
        } else if (type == "full_attention" || type == "attention") {
          pattern += '*';
        } else if (type == "mlp" || type == "moe") {
          pattern += type == "mlp" ? '-' : 'E';
        } else {
          reader.fail(fmt::format("config.json: layers_block_type[{}]", pattern.size()), type.dump(),
                      "linear_attention, full_attention, mlp or moe");
        }
      }
      return pattern;
    }
    const auto pattern = reader.hf().find("hybrid_override_pattern");
    if (pattern == reader.hf().end() || !pattern->is_string())
      reader.fail("config.json: layers_block_type", "nothing", "the kind of each layer");
    return pattern->get<std::string>();
  }

  void read_hf_layers(const ConfigReader& reader, ModelConfig& config) const {
    const std::string pattern = pattern_of(reader);
    config.layers = static_cast<int32_t>(pattern.size());
    if (pattern.empty() || pattern.size() > 1024 || pattern.find_first_not_of("M*-E") != std::string::npos)
      reader.fail("config.json: hybrid_override_pattern", pattern,
                  "M, *, - or E for each of 1 to 1024 layers");
    const int32_t said = reader.integer_or("", "num_hidden_layers", 1, 1024, config.layers);
    if (said != config.layers)
      reader.fail("config.json: num_hidden_layers", fmt::format("{}", said),
                  fmt::format("{}, the kinds of layers it lists", config.layers));
    for (const char kind : pattern) {
      config.state_layers.push_back(kind == 'M');
      config.bare_layers.push_back(kind == '-' || kind == 'E');
      if (has_experts()) config.dense_layers.push_back(kind != 'E');
    }
    config.kv_heads = reader.integer_or("", "num_key_value_heads", 1, 1024, config.heads);
    if (pattern.find('-') != std::string::npos)
      config.ffn = reader.integer("", "intermediate_size", 1, 1 << 20);
    for (const auto& [field, usual] : {std::pair{"mlp_hidden_act", "relu2"}, {"mamba_hidden_act", "silu"}}) {
      const auto found = reader.hf().find(field);
      if (found != reader.hf().end() && *found != usual)
        reader.fail(fmt::format("config.json: {}", field), found->dump(), fmt::format("\"{}\"", usual));
    }
    const auto latent = reader.hf().find("moe_latent_size");
    if (has_experts() && latent != reader.hf().end() && !latent->is_null())
      throw_error(ErrorCode::kUnsupported, "{}: config.json: moe_latent_size: found {}, expected none",
                  reader.checkpoint().path(), latent->dump());
  }

  // A layer that neither attends nor has an inner size is Mamba-2.
  void read_gguf_layers(const ConfigReader& reader, ModelConfig& config) const {
    config.layers = reader.integer("block_count", "", 1, 1024);
    const std::vector<bool> attends = read_attending_layers(reader, config);
    const std::string key = config.architecture + ".feed_forward_length";
    const io::GgufArray* inner = reader.checkpoint().gguf->get_array(key);
    if (inner == nullptr || inner->integers.size() != attends.size())
      reader.fail(key, inner == nullptr ? "nothing" : fmt::format("{} entries", inner->integers.size()),
                  fmt::format("a list of {}", config.layers));
    for (size_t l = 0; l < attends.size(); ++l) {
      const int64_t size = inner->integers[l];
      if (size < 0 || size > 1 << 20 || (attends[l] && size > 0))
        reader.fail(key, fmt::format("{}", size), "0 in layers of attention, at most 1048576 in others");
      const bool bare = size > 0;
      const auto number = static_cast<int>(l);
      const bool experts =
          bare && has_experts() && !reader.checkpoint().find_tensor(fmt::format("blk.{}.ffn_up.weight", l));
      config.state_layers.push_back(!attends[l] && !bare);
      config.bare_layers.push_back(bare);
      if (has_experts()) config.dense_layers.push_back(!experts);
      if (!bare || experts) continue;
      if (config.ffn != 0 && config.ffn != size)
        reader.fail(key, fmt::format("{} in layer {}", size, number), fmt::format("{}", config.ffn));
      config.ffn = static_cast<int32_t>(size);
    }
  }

  static void read_experts(const ConfigReader& reader, ModelConfig& config) {
    read_expert_sizes(reader, config, "n_routed_experts");
    config.shared_ffn = reader.integer("expert_shared_feed_forward_length",
                                       "moe_shared_expert_intermediate_size", 1, 1 << 20);
    read_sigmoid_weighting(reader, config);
    read_expert_scale(reader, config);
    read_expert_groups(reader, config);
    if (config.experts % config.expert_groups != 0 ||
        config.experts_per_token > config.experts / config.expert_groups * config.expert_groups_chosen)
      reader.fail("groups of experts",
                  fmt::format("{} of {}", config.expert_groups_chosen, config.expert_groups),
                  "groups of one size, with enough experts in those chosen");
  }

  static bool is_expert_layer(const ModelConfig& c, int layer) {
    return c.experts > 0 && !c.dense_layers.empty() && !c.is_dense(layer);
  }

  static void add_plain_feed_forward(std::vector<WeightSpec>& to, const ModelConfig& c) {
    using W = LayerWeights;
    const Presence rare = Presence::kRare;
    to.push_back(norm_weight("attn_norm.weight", "norm.weight", c.hidden, &W::ffn_norm));
    to.push_back(matrix_weight("ffn_up.weight", "mixer.up_proj.weight", c.ffn, c.hidden, &W::ffn_up));
    to.push_back(matrix_weight("ffn_down.weight", "mixer.down_proj.weight", c.hidden, c.ffn, &W::ffn_down));
    to.push_back(bias_weight("ffn_up.bias", "mixer.up_proj.bias", {c.ffn}, &W::ffn_up_bias, rare));
    to.push_back(bias_weight("ffn_down.bias", "mixer.down_proj.bias", {c.hidden}, &W::ffn_down_bias, rare));
  }

  static void add_expert_layer(std::vector<WeightSpec>& to, const ModelConfig& c) {
    using W = LayerWeights;
    constexpr std::string_view kBefore = "mixer.experts.";
    to.push_back(norm_weight("attn_norm.weight", "norm.weight", c.hidden, &W::ffn_norm));
    add_experts(to, c,
                {.router_weight = "mixer.gate.weight",
                 .router_bias = "",
                 .gate = {},
                 .up = {.single = "up_proj", .before = kBefore, .stacked = "mixer.experts.up_proj"},
                 .down = {.single = "down_proj", .before = kBefore, .stacked = "mixer.experts.down_proj"}});
    std::erase_if(to, [](const WeightSpec& spec) {
      return spec.role.starts_with("ffn_gate_exps") ||
             (spec.role.ends_with(".bias") && spec.role != "ffn_gate_inp.bias");
    });
    to.push_back(bias_weight("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", {c.experts},
                             &W::choice_bias, Presence::kUsual));
    to.push_back(matrix_weight("ffn_up_shexp.weight", "mixer.shared_experts.up_proj.weight", c.shared_ffn,
                               c.hidden, &W::shared_up));
    to.push_back(matrix_weight("ffn_down_shexp.weight", "mixer.shared_experts.down_proj.weight", c.hidden,
                               c.shared_ffn, &W::shared_down));
  }
};

class NemotronHMoe final : public NemotronH {
 public:
  std::string_view name() const override { return "nemotron_h_moe"; }
  std::vector<std::string_view> model_types() const override { return {"nemotron_h"}; }
  bool claims(const nlohmann::json& config) const override { return names_experts(config); }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"nemotron3-nano-30b-a3b", R"({"model_type": "nemotron_h", "hidden_size": 2688,
      "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856,
      "vocab_size": 131072, "max_position_embeddings": 262144, "mamba_num_heads": 64, "mamba_head_dim": 64,
      "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6,
      "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
      "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"})"},
        {"tiny-nemotron-h-moe", R"({"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "vocab_size": 640,
      "max_position_embeddings": 2048, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 32,
      "n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
      "moe_shared_expert_intermediate_size": 64, "hybrid_override_pattern": "ME*E"})"}};
  }

 protected:
  bool has_experts() const override { return true; }
};

const NemotronH kNemotronHObject{};
const NemotronHMoe kNemotronHMoeObject{};

}  // namespace

const Architecture& kNemotronH = kNemotronHObject;
const Architecture& kNemotronHMoe = kNemotronHMoeObject;

}  // namespace millrace
