// Kimi Linear: gated delta nets that forget each dimension of a key at its own rate (KDA), and every few
// layers latent attention without positions; DeepSeek V3's experts behind both. Moonshot AI 2025.
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/latent_decoder.h"
#include "model/mamba_layer.h"

namespace millrace {
namespace {

struct KimiWeights final : LatentWeights {
  WeightPtr conv_q, conv_k, conv_v, f_a, f_b, beta, a, g_a, g_b, dt_bias, norm;
};
using K = KimiWeights;

class KimiLinear final : public LatentDecoder {
 public:
  std::string_view name() const override { return "kimi-linear"; }
  std::vector<std::string_view> model_types() const override { return {"kimi_linear"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
      "num_hidden_layers": 27, "num_attention_heads": 32, "n_shared_experts": 1, "routed_scaling_factor": 2.446,
      "kv_lora_rank": 512, "q_lora_rank": null, "qk_rope_head_dim": 64, "v_head_dim": 128,
      "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": true,
      "n_routed_experts": 256, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
      "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_local_experts", "n_routed_experts"},
            {"num_experts", "n_routed_experts"},
            {"num_experts_per_token", "num_experts_per_tok"},
            {"num_shared_experts", "n_shared_experts"},
            {"moe_renormalize", "norm_topk_prob"},
            {"num_expert_group", "n_group"},
            {"model_max_length", "max_position_embeddings"}};
  }
  // Published files have what is linear in an object of its own, with layers counted from one.
  void settle_hf(nlohmann::json& config) const override {
    const auto linear = config.find("linear_attn_config");
    const bool object = linear != config.end() && linear->is_object();
    if (object) {
      for (const auto& [from, to] : {std::pair{"head_dim", "linear_head_dim"},
                                     {"num_heads", "linear_num_heads"},
                                     {"short_conv_kernel_size", "linear_conv_kernel_dim"}}) {
        if (linear->contains(from)) config[to] = linear->at(from);
      }
    }
    const auto dense = config.find("mlp_layer_types");
    if (dense != config.end() && dense->is_array()) {
      size_t first = 0;
      while (first < dense->size() && (*dense)[first] == "dense") ++first;
      for (size_t l = first; l < dense->size(); ++l) {
        if ((*dense)[l] != "sparse")
          throw_error(
              ErrorCode::kUnsupported,
              "config.json: mlp_layer_types[{}]: found {}, expected dense layers first and sparse ones "
              "behind them",
              l, (*dense)[l].dump());
      }
      config["first_k_dense_replace"] = first;
    }
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    LatentDecoder::read_config(reader, config);
    config.unrotated_layers.assign(static_cast<size_t>(config.layers), true);
    if (reader.is_gguf()) {
      int32_t attended = 0;
      std::swap(attended, config.kv_heads);  // of what is absorbed there is one
      for (const bool attends : read_attending_layers(reader, config))
        config.state_layers.push_back(!attends);
      config.kv_heads = attended;
    } else {
      read_hf_layers(reader, config);
    }
    StateShape& s = config.state;
    s.key_heads = s.value_heads = reader.integer("attention.head_count", "linear_num_heads", 1, 1024);
    s.key_dim = s.value_dim = reader.integer("kda.head_dim", "linear_head_dim", 1, 1024);
    s.taps = reader.integer("ssm.conv_kernel", "linear_conv_kernel_dim", 1, kMaxTaps);
    s.channel_decay = true;
    if (s.key_dim > config.hidden)
      reader.fail("a head of linear attention", fmt::format("{}", s.key_dim),
                  fmt::format("at most {}, the residual stream's", config.hidden));
    s.projected = static_cast<int32_t>(5 * s.keys() + s.value_heads + 2 * int64_t{s.key_dim});
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    if (c.state.value_heads != c.heads)
      throw_error(ErrorCode::kUnsupported,
                  "{}: linear_num_heads: found {}, expected {} to write a GGUF file, which has one number",
                  keys.reader().checkpoint().path(), c.state.value_heads, c.heads);
    LatentDecoder::write_keys(keys);
    write_attending_layers(keys);
    keys.size("ssm.conv_kernel", c.state.taps);
    keys.size("kda.head_dim", c.state.key_dim);
  }

  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<K>(); }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    std::vector<WeightSpec> weights;
    if (config.has_state(layer)) {
      add_delta_attention(weights, config);
    } else {
      add_latent_attention(weights, config);
    }
    add_behind_attention(weights, config, layer);
    return weights;
  }

  void layer(Executor& x, const LayerWeights& weights, const ModelConfig& config, int index) const override {
    const auto& w = static_cast<const K&>(weights);
    if (config.has_state(index)) {
      x.norm_mix(inputs_of(w, config));
      x.mix({.layer = index,
             .kind = StateMix::Kind::kGatedDelta,
             .conv = w.conv_q.get(),
             .conv_keys = w.conv_k.get(),
             .conv_values = w.conv_v.get(),
             .a = w.a.get(),
             .step_bias = w.dt_bias.get(),
             .norm = {w.norm.get(), config.norm_eps},
             .norm_size = config.state.value_dim,
             .norm_before_gate = true,
             .gate_sigmoid = true});
      x.project_add({.linear = {w.attn_output.get()}});
    } else {
      attend_latent(x, w, config, index);
    }
    feed_forward_or_experts(x, w, config, index);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"kimi-linear-48b-a3b", R"({"model_type": "kimi_linear", "vocab_size": 163840,
      "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
      "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17,
      18, 19, 21, 22, 23, 25, 26]}})"},
            {"tiny-kimi-linear", R"({"model_type": "kimi_linear", "vocab_size": 640, "num_hidden_layers": 3,
      "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
      "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
      "n_routed_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048, "linear_attn_config":
      {"head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2],
      "kda_layers": [1, 3]}})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 protected:
  HfChoice hf_choice(const ConfigReader&) const override { return {}; }

  FeedForwardNamesOf behind_attention(const ModelConfig& config) const override {
    constexpr std::string_view kBefore = "block_sparse_moe.experts.";
    constexpr std::string_view kBoth = "block_sparse_moe.experts.gate_up_proj";
    return {.experts = {.router_weight = "block_sparse_moe.gate.weight",
                        .router_bias = "",
                        .gate = {.single = "w1", .before = kBefore, .stacked = kBoth, .parts = 2},
                        .up = {.single = "w3",
                               .first_row = config.expert_ffn,
                               .before = kBefore,
                               .stacked = kBoth,
                               .parts = 2},
                        .down = {.single = "w2",
                                 .before = kBefore,
                                 .stacked = "block_sparse_moe.experts.down_proj"}},
            .choice_bias = "block_sparse_moe.gate.e_score_correction_bias",
            .shared = {.gate = "block_sparse_moe.shared_experts.gate_proj.weight",
                       .up = "block_sparse_moe.shared_experts.up_proj.weight",
                       .down = "block_sparse_moe.shared_experts.down_proj.weight"}};
  }

 private:
  static void read_hf_layers(const ConfigReader& reader, ModelConfig& config) {
    if (read_hf_state_layers(reader, config, {"linear_attention"}, {"full_attention"},
                             "linear_attention or full_attention"))
      return;
    config.state_layers.assign(static_cast<size_t>(config.layers), true);
    const auto linear = reader.hf().find("linear_attn_config");
    if (linear == reader.hf().end() || !linear->is_object() || !linear->contains("full_attn_layers")) {
      for (int32_t l = 4; l < config.layers; l += 4) config.state_layers[static_cast<size_t>(l)] = false;
      return;
    }
    for (const nlohmann::json& layer : linear->at("full_attn_layers")) {
      if (!layer.is_number_integer() || layer.get<int64_t>() < 1 || layer.get<int64_t>() > config.layers)
        reader.fail("config.json: linear_attn_config: full_attn_layers", layer.dump(),
                    fmt::format("layers from 1 to {}", config.layers));
      config.state_layers[layer.get<size_t>() - 1] = false;
    }
  }

  static void add_delta_attention(std::vector<WeightSpec>& to, const ModelConfig& c) {
    const int64_t hidden = c.hidden, dim = c.state.key_dim, all = c.state.keys(), heads = c.state.value_heads;
    const auto matrix = [&](std::string_view role, std::string_view hf, int64_t rows, int64_t cols,
                            WeightMember member) {
      to.push_back(matrix_weight(role, hf, rows, cols, member));
    };
    const auto vector = [&](std::string_view role, std::string_view hf, std::vector<int64_t> shape,
                            WeightMember member) {
      to.push_back(bias_weight(role, hf, std::move(shape), member, Presence::kRequired));
    };
    to.push_back(norm_weight("attn_norm.weight", "input_layernorm.weight", hidden, &LayerWeights::attn_norm));
    matrix("attn_q.weight", "self_attn.q_proj.weight", all, hidden, &LayerWeights::attn_q);
    matrix("attn_k.weight", "self_attn.k_proj.weight", all, hidden, &LayerWeights::attn_k);
    matrix("attn_v.weight", "self_attn.v_proj.weight", all, hidden, &LayerWeights::attn_v);
    matrix("ssm_f_a.weight", "self_attn.f_a_proj.weight", dim, hidden, own_weight(&K::f_a));
    matrix("ssm_f_b.weight", "self_attn.f_b_proj.weight", all, dim, own_weight(&K::f_b));
    matrix("ssm_g_a.weight", "self_attn.g_a_proj.weight", dim, hidden, own_weight(&K::g_a));
    matrix("ssm_g_b.weight", "self_attn.g_b_proj.weight", all, dim, own_weight(&K::g_b));
    matrix("ssm_beta.weight", "self_attn.b_proj.weight", heads, hidden, own_weight(&K::beta));
    vector("ssm_conv1d_q.weight", "self_attn.q_conv1d.weight", {all, c.state.taps}, own_weight(&K::conv_q));
    to.back().spread = 0.5;
    vector("ssm_conv1d_k.weight", "self_attn.k_conv1d.weight", {all, c.state.taps}, own_weight(&K::conv_k));
    to.back().spread = 0.5;
    vector("ssm_conv1d_v.weight", "self_attn.v_conv1d.weight", {all, c.state.taps}, own_weight(&K::conv_v));
    to.back().spread = 0.5;
    vector("ssm_dt.bias", "self_attn.dt_bias", {all}, own_weight(&K::dt_bias));
    vector("ssm_a", "self_attn.A_log", {heads}, own_weight(&K::a));
    to.back().hf_negative_log = true;
    to.back().spread = 0.0;
    to.back().synthetic = -0.5f;
    to.push_back(norm_weight("ssm_norm.weight", "self_attn.o_norm.weight", dim, own_weight(&K::norm)));
    matrix("attn_output.weight", "self_attn.o_proj.weight", hidden, all, &LayerWeights::attn_output);
  }

  // A row: queries, keys, values, beta, what the steps and the gate are made of; these two behind them.
  static NormMix inputs_of(const K& w, const ModelConfig& config) {
    const StateShape& s = config.state;
    const auto all = static_cast<int32_t>(s.keys());
    const int32_t heads = s.value_heads, dim = s.key_dim, beta = 3 * all, low = beta + heads;
    const int32_t steps = low + 2 * dim, gate = steps + all;
    return {.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
            .in = {Linear{w.attn_q.get()}, Linear{w.attn_k.get()}, Linear{w.attn_v.get()},
                   Linear{w.beta.get()}, Linear{w.f_a.get()}, Linear{w.g_a.get()}},
            .behind = {NormMix::Behind{{w.f_b.get()}, low}, NormMix::Behind{{w.g_b.get()}, low + dim}},
            .query = HeadColumns::plain(0, heads, dim),
            .key = HeadColumns::plain(all, heads, dim),
            .value = HeadColumns::plain(2 * all, heads, dim),
            .gate = HeadColumns::plain(gate, heads, dim),
            .step = HeadColumns::plain(steps, heads, dim),
            .beta = HeadColumns::plain(beta, heads, 1)};
  }
};

const KimiLinear kKimiLinearObject{};

}  // namespace

const Architecture& kKimiLinear = kKimiLinearObject;

}  // namespace millrace
