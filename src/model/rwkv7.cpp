// RWKV 7 (Goose): a time mix with a state of one matrix for each head and a channel mix, both with a token
// shift; values of the first layer are mixed into those of the others. Peng et al. 2025. Directories are
// those of flash-linear-attention.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/layer_norm.h"

namespace millrace {
namespace {

constexpr int32_t kRwkv7Context = 1 << 20;   // what GGUF files say: nothing limits it
constexpr int32_t kRwkv7HeadDim = 32;        // of the attention that no layer has
constexpr float kRwkv7GgufHeadEps = 64e-5f;  // of the norm of a head: GGUF has no key for it

struct Rwkv7LayerWeights : LayerWeights {
  WeightPtr lerp, w0, w1, w2, a0, a1, a2, v0, v1, v2, g1, g2, k_k, k_a, r_k, head_norm, head_norm_bias;
  WeightPtr channel_lerp;
};
using R = Rwkv7LayerWeights;

// The ranks of its products of low rank, under these names in ModelConfig::own.
struct Rank {
  std::string_view own, gguf, hf;
  std::string_view stored;  // a weight of a directory that has as many rows, where config.json says null
};
constexpr Rank kDecayRank = {"decay_rank", "attention.decay_lora_rank", "decay_low_rank_dim",
                             "model.layers.0.attn.w_lora.lora.0.weight"};
constexpr Rank kRateRank = {"rate_rank", "attention.iclr_lora_rank", "a_low_rank_dim",
                            "model.layers.0.attn.a_lora.lora.0.weight"};
constexpr Rank kValueRank = {"value_rank", "attention.value_residual_mix_lora_rank", "v_low_rank_dim",
                             "model.layers.1.attn.v_lora.lora.0.weight"};
constexpr Rank kGateRank = {"gate_rank", "attention.gate_lora_rank", "gate_low_rank_dim",
                            "model.layers.0.attn.g_lora.lora.0.weight"};

int64_t rank_of(const ModelConfig& config, const Rank& rank) {
  return static_cast<int64_t>(config.own.find(rank.own)->second);
}

class Rwkv7 final : public Architecture {
 public:
  std::string_view name() const override { return "rwkv7"; }
  std::vector<std::string_view> model_types() const override { return {"rwkv7", "rwkv7_fla"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "hidden_ratio": 4, "intermediate_size": null, "num_hidden_layers": 24,
      "head_dim": 64, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
      "v_low_rank_dim": 16, "hidden_act": "sqrelu", "norm_eps": 1e-5, "vocab_size": 32000})";
  }
  HfNames hf_names() const override { return {.embedding = "model.embeddings.weight"}; }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
    config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
    config.context_length = reader.integer_or("context_length", "", 1, 1 << 28, kRwkv7Context);
    config.heads = config.kv_heads = 1;
    config.head_dim = kRwkv7HeadDim;
    config.layer_windows.assign(static_cast<size_t>(config.layers), 0);
    config.state_layers.assign(static_cast<size_t>(config.layers), true);
    read_layer_norm(reader, config, "norm_eps");
    StateShape& s = config.state;
    s.key_dim = s.value_dim = head_dim(reader, config.hidden);
    s.key_heads = s.value_heads = config.hidden / s.key_dim;
    if (config.hidden % s.key_dim != 0)
      reader.fail("the residual stream", fmt::format("{} columns", config.hidden),
                  fmt::format("a multiple of {}, a head's", s.key_dim));
    s.taps = 2;
    s.channel_decay = s.wkv7 = true;
    for (const Rank& rank : {kDecayRank, kRateRank, kValueRank, kGateRank}) {
      const int32_t size = read_rank(reader, rank, config);
      config.own[std::string(rank.own)] = static_cast<float>(size);
      s.projected = std::max(s.projected, size);
    }
    config.own["head_eps"] =
        reader.is_gguf() ? kRwkv7GgufHeadEps : static_cast<float>(s.key_dim) * config.norm_eps;
    if (reader.is_gguf()) {
      config.ffn = reader.integer("feed_forward_length", "", 1, 1 << 20);
    } else {
      check_hf(reader, config);
      config.ffn = hf_ffn(reader, config.hidden);
    }
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    const float eps = c.own.find("head_eps")->second;
    if (std::abs(eps - kRwkv7GgufHeadEps) > 1e-8f)
      throw_error(
          ErrorCode::kUnsupported,
          "{}: norm_eps: found {} for heads of {}, expected {} to write a GGUF file, which has no key "
          "for it",
          keys.reader().checkpoint().path(), c.norm_eps, c.state.key_dim,
          kRwkv7GgufHeadEps / static_cast<float>(c.state.key_dim));
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    keys.size("feed_forward_length", c.ffn);
    keys.size("attention.head_count", 0);
    keys.size("wkv.head_size", c.state.key_dim);
    keys.size("token_shift_count", 2);
    keys.size("vocab_size", c.vocab);
    for (const Rank& rank : {kDecayRank, kRateRank, kValueRank, kGateRank})
      keys.size(rank.gguf, rank_of(c, rank));
    write_layer_norm(keys);
  }

  std::vector<WeightSpec> outer_weights(const ModelConfig& c) const override {
    using M = ModelWeights;
    return {outer_vector("output_norm.bias", "model.norm.bias", c.hidden, &M::output_norm_bias,
                         Presence::kUsual, kBiasSpread),
            outer_vector("token_embd_norm.weight", "model.layers.0.pre_norm.weight", c.hidden,
                         &M::embedding_norm, Presence::kUsual, 0.0),
            outer_vector("token_embd_norm.bias", "model.layers.0.pre_norm.bias", c.hidden,
                         &M::embedding_norm_bias, Presence::kUsual, kBiasSpread)};
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int layer) const override {
    using W = LayerWeights;
    std::vector<WeightSpec> to;
    const int64_t n = c.hidden;
    const auto vector = [&](std::string_view role, std::string_view hf, WeightMember member,
                            float synthetic) {
      to.push_back(bias_weight(role, hf, {n}, member, Presence::kRequired));
      to.back().spread = 0.0;
      to.back().synthetic = synthetic;
    };
    add_layer_norm(to, {"attn_norm.weight", "attn_norm.bias", "attn_norm.weight", "attn_norm.bias"}, n,
                   &W::attn_norm, &W::attn_norm_bias);
    to.push_back({.role = "time_mix_lerp_fused.weight",
                  .hf = "attn.x_x",
                  .shape = {6, 1, 1, n},
                  .to = own_weight(&R::lerp),
                  .synthetic = 0.4f,
                  .hf_rows = {"attn.x_r", "attn.x_w", "attn.x_k", "attn.x_v", "attn.x_a", "attn.x_g"}});
    const auto low = [&](std::string_view one, std::string_view two, std::string_view hf_one,
                         std::string_view hf_two, const Rank& rank, WeightPtr R::*down, WeightPtr R::*up) {
      to.push_back(matrix_weight(one, hf_one, rank_of(c, rank), n, own_weight(down)));
      to.push_back(matrix_weight(two, hf_two, n, rank_of(c, rank), own_weight(up)));
    };
    vector("time_mix_w0.weight", "attn.w_lora.lora.2.bias", own_weight(&R::w0), -2.0f);
    low("time_mix_w1.weight", "time_mix_w2.weight", "attn.w_lora.lora.0.weight", "attn.w_lora.lora.2.weight",
        kDecayRank, &R::w1, &R::w2);
    vector("time_mix_a0.weight", "attn.a_lora.lora.2.bias", own_weight(&R::a0), 0.0f);
    low("time_mix_a1.weight", "time_mix_a2.weight", "attn.a_lora.lora.0.weight", "attn.a_lora.lora.2.weight",
        kRateRank, &R::a1, &R::a2);
    if (layer > 0) {  // GGUF files have these of the first layer too, and nobody reads them
      vector("time_mix_v0.weight", "attn.v_lora.lora.2.bias", own_weight(&R::v0), 0.0f);
      low("time_mix_v1.weight", "time_mix_v2.weight", "attn.v_lora.lora.0.weight",
          "attn.v_lora.lora.2.weight", kValueRank, &R::v1, &R::v2);
    }
    low("time_mix_g1.weight", "time_mix_g2.weight", "attn.g_lora.lora.0.weight", "attn.g_lora.lora.2.weight",
        kGateRank, &R::g1, &R::g2);
    vector("time_mix_k_k.weight", "attn.k_k", own_weight(&R::k_k), 0.7f);
    vector("time_mix_k_a.weight", "attn.k_a", own_weight(&R::k_a), 1.0f);
    vector("time_mix_r_k.weight", "attn.r_k", own_weight(&R::r_k), -0.04f);
    to.push_back(matrix_weight("time_mix_key.weight", "attn.k_proj.weight", n, n, &W::attn_k));
    to.push_back(matrix_weight("time_mix_value.weight", "attn.v_proj.weight", n, n, &W::attn_v));
    to.push_back(matrix_weight("time_mix_receptance.weight", "attn.r_proj.weight", n, n, &W::attn_q));
    add_layer_norm(to, {"time_mix_ln.weight", "time_mix_ln.bias", "attn.g_norm.weight", "attn.g_norm.bias"},
                   n, own_weight(&R::head_norm), own_weight(&R::head_norm_bias), Presence::kRequired);
    to.push_back(matrix_weight("time_mix_output.weight", "attn.o_proj.weight", n, n, &W::attn_output));
    add_layer_norm(to, {"attn_norm_2.weight", "attn_norm_2.bias", "ffn_norm.weight", "ffn_norm.bias"}, n,
                   &W::ffn_norm, &W::ffn_norm_bias);
    vector("channel_mix_lerp_k.weight", "ffn.x_k", own_weight(&R::channel_lerp), 0.4f);
    to.push_back(matrix_weight("channel_mix_key.weight", "ffn.key.weight", c.ffn, n, &W::ffn_up));
    to.push_back(matrix_weight("channel_mix_value.weight", "ffn.value.weight", n, c.ffn, &W::ffn_down));
    return to;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<R>(); }

  void layer(Executor& x, const LayerWeights& weights, const ModelConfig& config, int index) const override {
    const auto& w = static_cast<const R&>(weights);
    x.time_mix({.layer = index,
                .first = index == 0,
                .norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
                .shift = w.lerp.get(),
                .r = {w.attn_q.get()},
                .k = {w.attn_k.get()},
                .v = {w.attn_v.get()},
                .decay = {{w.w1.get()}, {w.w2.get(), w.w0.get()}},
                .rate = {{w.a1.get()}, {w.a2.get(), w.a0.get()}},
                .value = {{w.v1.get()}, {w.v2.get(), w.v0.get()}},
                .gate = {{w.g1.get()}, {w.g2.get()}},
                .k_k = w.k_k.get(),
                .k_a = w.k_a.get(),
                .r_k = w.r_k.get(),
                .head_norm = {.weight = w.head_norm.get(),
                              .eps = config.own.find("head_eps")->second,
                              .bias = w.head_norm_bias.get(),
                              .kind = Norm::Kind::kLayer}});
    x.project_add({.linear = {w.attn_output.get()}});
    x.channel_mix_add({.layer = index,
                       .norm = norm_of(config, w.ffn_norm, w.ffn_norm_bias),
                       .shift = w.channel_lerp.get(),
                       .key = {w.ffn_up.get()},
                       .value = {w.ffn_down.get()}});
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"rwkv7-2.9b", R"({"model_type": "rwkv7", "num_hidden_layers": 32, "hidden_size": 2560,
      "decay_low_rank_dim": 96, "gate_low_rank_dim": 320, "a_low_rank_dim": 96, "v_low_rank_dim": 64,
      "vocab_size": 65536})"},
            {"tiny-rwkv7", R"({"model_type": "rwkv7", "num_hidden_layers": 2, "hidden_size": 128,
      "decay_low_rank_dim": 32, "gate_low_rank_dim": 32, "a_low_rank_dim": 32, "v_low_rank_dim": 32,
      "vocab_size": 640})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("gpt-2", vocab);
  }

 private:
  // flash-linear-attention takes the number of heads where no size is given.
  static int32_t head_dim(const ConfigReader& reader, int32_t hidden) {
    if (reader.is_gguf() || !reader.hf().at("head_dim").is_null())
      return reader.integer("wkv.head_size", "head_dim", 1, 1024);
    return hidden / reader.integer("", "num_heads", 1, hidden);
  }

  static int32_t read_rank(const ConfigReader& reader, const Rank& rank, const ModelConfig& config) {
    if (!reader.is_gguf() && reader.hf().at(rank.hf).is_null()) {
      const TensorView* stored = reader.checkpoint().find_tensor(std::string(rank.stored));
      if (stored == nullptr && config.layers == 1 && rank.own == kValueRank.own) return 1;
      if (stored == nullptr || stored->rank != 2 || stored->shape[0] > config.hidden)
        reader.fail(fmt::format("config.json: {}", rank.hf), "null",
                    fmt::format("a number, or the rows of {}", rank.stored));
      return static_cast<int32_t>(stored->shape[0]);
    }
    return reader.integer(rank.gguf, rank.hf, 1, config.hidden);
  }

  static int32_t hf_ffn(const ConfigReader& reader, int32_t hidden) {
    if (!reader.hf().at("intermediate_size").is_null())
      return reader.integer("", "intermediate_size", 1, 1 << 20);
    const bool usual = reader.hf().at("hidden_ratio").is_null();
    const auto size = static_cast<int64_t>(hidden * (usual ? 4.0 : reader.real_or("", "hidden_ratio", 4.0)));
    if (size < 1 || size > 1 << 20)
      reader.fail("config.json: hidden_ratio", reader.hf().at("hidden_ratio").dump(), "above 0");
    return static_cast<int32_t>((size + 31) / 32 * 32);
  }

  static void check_hf(const ConfigReader& reader, const ModelConfig& config) {
    const auto refuse = [&](std::string_view key, const std::string& expected) {
      throw_error(ErrorCode::kUnsupported, "{}: config.json: {}: found {}, expected {}",
                  reader.checkpoint().path(), key, reader.hf().at(key).dump(), expected);
    };
    const auto found = [&](std::string_view key) {
      const auto at = reader.hf().find(key);
      return at == reader.hf().end() ? nlohmann::json() : *at;
    };
    if (const nlohmann::json act = found("hidden_act"); act != "sqrelu" && act != "relu2")
      refuse("hidden_act", "\"sqrelu\"");
    if (!found("attn").is_null()) refuse("attn", "null: no layers of attention");
    const nlohmann::json values = found("value_dim");
    const bool all = values.is_array() && std::all_of(values.begin(), values.end(), [&](const auto& v) {
                       return v.is_null() || v == config.hidden;
                     });
    if (!values.is_null() && values != config.hidden && !all)
      refuse("value_dim", fmt::format("{}, the residual stream's", config.hidden));
  }
};

const Rwkv7 kRwkv7Object{};

}  // namespace

const Architecture& kRwkv7 = kRwkv7Object;

}  // namespace millrace
