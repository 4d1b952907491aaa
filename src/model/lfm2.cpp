// LFM 2: layers that are short convolutions between two gates, and a few of attention with q and k normed;
// the larger ones with experts behind the first layers. Liquid AI 2025.
#include <fmt/core.h>

#include <algorithm>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

struct ConvLayerWeights : LayerWeights {
  WeightPtr conv_in, conv, conv_out, conv_in_bias, conv_bias, conv_out_bias;
};
using C = ConvLayerWeights;

// The KV heads of each layer: none of one that is a convolution.
void read_gguf_layers(const ConfigReader& reader, ModelConfig& config) {
  const std::string key = config.architecture + ".attention.head_count_kv";
  const io::GgufArray* heads = reader.checkpoint().gguf->get_array(key);
  if (heads == nullptr || heads->integers.size() != static_cast<size_t>(config.layers))
    reader.fail(key, heads == nullptr ? "nothing" : fmt::format("{} entries", heads->integers.size()),
                fmt::format("a list of {}", config.layers));
  for (int32_t l = 0; l < config.layers; ++l) {
    const int64_t kv = heads->integers[static_cast<size_t>(l)];
    config.state_layers.push_back(kv == 0);
    if (kv == 0) continue;
    if (kv < 0 || kv > 1024 || (config.kv_heads != 0 && kv != config.kv_heads))
      reader.fail(key, fmt::format("{}", kv), "0 or one number of heads for all layers of attention");
    config.kv_heads = static_cast<int32_t>(kv);
  }
}

void read_hf_layers(const ConfigReader& reader, ModelConfig& config) {
  if (read_hf_state_layers(reader, config, {"conv"}, {"full_attention"}, "conv or full_attention")) return;
  const auto full = reader.hf().find("full_attn_idxs");
  if (full == reader.hf().end() || !full->is_array()) return;
  for (int32_t l = 0; l < config.layers; ++l)
    config.state_layers[static_cast<size_t>(l)] =
        std::find(full->begin(), full->end(), nlohmann::json(l)) == full->end();
}

class Lfm2 : public Architecture {
 public:
  std::string_view name() const override { return "lfm2"; }
  std::vector<std::string_view> model_types() const override { return {"lfm2"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0,
      "conv_bias": false, "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
      "block_auto_adjust_ff_dim": true, "tie_word_embeddings": true})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"block_ff_dim", "intermediate_size"}, {"tie_embedding", "tie_word_embeddings"}};
  }
  HfNames hf_names() const override {
    return {.output_norm = "model.embedding_norm.weight", .gguf_output_norm = "token_embd_norm.weight"};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_lfm2(reader, config);
    config.ffn = reader.is_gguf() ? reader.integer("feed_forward_length", "", 1, 1 << 20) : hf_ffn(reader);
  }

  void write_keys(GgufKeys& keys) const override { write_lfm2(keys, keys.config().ffn); }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    std::vector<WeightSpec> weights = mixer_weights(config, layer);
    add_feed_forward(weights, config, kFeedForward);
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<C>(); }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    mixer(x, w, config, index);
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"lfm2-1.2b", R"({"model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048,
      "intermediate_size": 8192, "block_auto_adjust_ff_dim": false, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000,
      "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_word_embeddings": true})"},
            {"tiny-lfm2", R"({"model_type": "lfm2", "num_hidden_layers": 3, "hidden_size": 64,
      "intermediate_size": 128, "block_auto_adjust_ff_dim": false, "num_attention_heads": 4,
      "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048, "full_attn_idxs": [1],
      "tie_word_embeddings": true})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("lfm2", vocab);
  }

 protected:
  static constexpr FeedForwardNames kFeedForward = {
      .gate = "feed_forward.w1.weight", .up = "feed_forward.w3.weight", .down = "feed_forward.w2.weight"};

  // The KV heads of a GGUF file are a list, which read_sizes does not read.
  static void read_lfm2(const ConfigReader& reader, ModelConfig& config) {
    read_outer_sizes(reader, config);
    if (reader.is_gguf()) {
      read_gguf_layers(reader, config);
    } else {
      config.kv_heads = reader.integer_or("", "num_key_value_heads", 1, 1024, config.heads);
      read_hf_layers(reader, config);
    }
    if (config.kv_heads == 0) config.kv_heads = config.heads;
    config.head_dim =
        reader.integer_or("attention.key_length", "head_dim", 1, 1024, config.hidden / config.heads);
    check_heads(reader, config);
    read_norm_eps(reader, config, "norm_eps");
    StateShape& s = config.state;
    s.value_heads = 1;
    s.value_dim = config.hidden;
    s.taps = reader.integer("shortconv.l_cache", "conv_L_cache", 1, kMaxTaps);
    s.projected = 3 * config.hidden;
    read_rope(reader, config);
  }

  static int32_t hf_ffn(const ConfigReader& reader) {
    int64_t size = reader.integer("", "intermediate_size", 1, 1 << 20);
    if (!reader.flag_or("", "block_auto_adjust_ff_dim", true)) return static_cast<int32_t>(size);
    size = 2 * size / 3;
    if (reader.hf().at("block_ffn_dim_multiplier").is_null()) return static_cast<int32_t>(size);
    const int64_t multiple = reader.integer("", "block_multiple_of", 1, 1 << 20);
    size =
        static_cast<int64_t>(reader.real_or("", "block_ffn_dim_multiplier", 1.0) * static_cast<double>(size));
    return static_cast<int32_t>((size + multiple - 1) / multiple * multiple);
  }

  static void write_lfm2(GgufKeys& keys, int64_t feed_forward) {
    const ModelConfig& c = keys.config();
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    keys.size("feed_forward_length", feed_forward);
    keys.size("attention.head_count", c.heads);
    keys.size("attention.key_length", c.head_dim);
    keys.size("attention.value_length", c.head_dim);
    keys.size("vocab_size", c.vocab);
    std::vector<int32_t> heads;
    for (int32_t l = 0; l < c.layers; ++l) heads.push_back(c.has_state(l) ? 0 : c.kv_heads);
    keys.sizes("attention.head_count_kv", heads);
    keys.size("shortconv.l_cache", c.state.taps);
    write_norm(keys);
    write_rope(keys);
  }

  static std::vector<WeightSpec> mixer_weights(const ModelConfig& c, int layer) {
    using W = LayerWeights;
    std::vector<WeightSpec> weights;
    const int64_t hidden = c.hidden;
    if (c.has_state(layer)) {
      weights.push_back(norm_weight("attn_norm.weight", "operator_norm.weight", hidden, &W::attn_norm));
      weights.push_back(matrix_weight("shortconv.in_proj.weight", "conv.in_proj.weight", 3 * hidden, hidden,
                                      own_weight(&C::conv_in)));
      weights.push_back(bias_weight("shortconv.conv.weight", "conv.conv.weight", {hidden, c.state.taps},
                                    own_weight(&C::conv), Presence::kRequired));
      weights.back().spread = 0.5;
      weights.push_back(matrix_weight("shortconv.out_proj.weight", "conv.out_proj.weight", hidden, hidden,
                                      own_weight(&C::conv_out)));
      weights.push_back(bias_weight("shortconv.in_proj.bias", "conv.in_proj.bias", {3 * hidden},
                                    own_weight(&C::conv_in_bias), Presence::kRare));
      weights.push_back(bias_weight("shortconv.conv.bias", "conv.conv.bias", {hidden},
                                    own_weight(&C::conv_bias), Presence::kRare));
      weights.push_back(bias_weight("shortconv.out_proj.bias", "conv.out_proj.bias", {hidden},
                                    own_weight(&C::conv_out_bias), Presence::kRare));
    } else {
      add_attention(weights, c, {.qk_norm = true});
      for (WeightSpec& spec : weights) {
        if (spec.role == "attn_norm.weight") spec.hf = "operator_norm.weight";
        if (spec.role == "attn_output.weight") spec.hf = "self_attn.out_proj.weight";
        if (spec.role == "attn_q_norm.weight") spec.hf = "self_attn.q_layernorm.weight";
        if (spec.role == "attn_k_norm.weight") spec.hf = "self_attn.k_layernorm.weight";
      }
    }
    weights.push_back(norm_weight("ffn_norm.weight", "ffn_norm.weight", hidden, &W::ffn_norm));
    return weights;
  }

  static void mixer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) {
    if (!config.has_state(index)) {
      x.norm_qkv(qkv_of(w, config));
      x.rope_append_kv(rope_of(config, index));
      x.attend(attend_of(w, config, index));
      return x.project_add(project_of(w, config));
    }
    const auto& own = static_cast<const C&>(w);
    const int32_t n = config.hidden;
    x.norm_mix({.norm = norm_of(config, w.attn_norm, w.attn_norm_bias),
                .in = {Linear{own.conv_in.get(), own.conv_in_bias.get()}},
                .query = {},
                .key = {},
                .value = HeadColumns::plain(2 * n, 1, n),
                .gate = HeadColumns::plain(n, 1, n),
                .step = {},
                .beta = {},
                .value_by = HeadColumns::plain(0, 1, n)});
    x.mix({.layer = index,
           .kind = StateMix::Kind::kConvolution,
           .conv = own.conv.get(),
           .conv_bias = own.conv_bias.get(),
           .conv_silu = false});
    x.project_add({.linear = {own.conv_out.get(), own.conv_out_bias.get()}});
  }
};

class Lfm2Moe final : public Lfm2 {
 public:
  std::string_view name() const override { return "lfm2moe"; }
  std::vector<std::string_view> model_types() const override { return {"lfm2_moe"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
      "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
      "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0, "conv_bias": false,
      "conv_L_cache": 3, "num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32,
      "use_expert_bias": true, "routed_scaling_factor": 1.0, "norm_topk_prob": true,
      "tie_word_embeddings": true})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_lfm2(reader, config);
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    read_expert_sizes(reader, config, "num_experts");
    read_sigmoid_weighting(reader, config);
    read_expert_scale(reader, config);
    config.dense_layers.assign(static_cast<size_t>(config.layers), false);
    const int32_t dense = reader.integer_or("leading_dense_block_count", "num_dense_layers", 0, 1024, 0);
    for (int32_t l = 0; l < std::min(dense, config.layers); ++l)
      config.dense_layers[static_cast<size_t>(l)] = true;
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    write_lfm2(keys, c.ffn);
    write_experts(keys);
    keys.size("leading_dense_block_count", std::count(c.dense_layers.begin(), c.dense_layers.end(), true));
    keys.size("expert_gating_func", 2);
    if (c.expert_weighting == Route::Weighting::kSigmoid) keys.flag("expert_weights_norm", false);
    if (c.expert_scale != 1.0f) keys.real("expert_weights_scale", c.expert_scale);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    if (config.is_dense(layer)) return Lfm2::layer_weights(config, layer);
    std::vector<WeightSpec> weights = mixer_weights(config, layer);
    constexpr std::string_view kBefore = "feed_forward.experts.", kBoth = "feed_forward.experts.gate_up_proj";
    add_experts(weights, config,
                {.router_weight = "feed_forward.gate.weight",
                 .router_bias = "",
                 .gate = {.single = "w1", .before = kBefore, .stacked = kBoth, .parts = 2},
                 .up = {.single = "w3",
                        .first_row = config.expert_ffn,
                        .before = kBefore,
                        .stacked = kBoth,
                        .parts = 2},
                 .down = {.single = "w2", .before = kBefore, .stacked = "feed_forward.experts.down_proj"}});
    weights.push_back(bias_weight("exp_probs_b.bias", "feed_forward.expert_bias", {config.experts},
                                  &LayerWeights::choice_bias, Presence::kUsual));
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    mixer(x, w, config, index);
    feed_forward_or_experts(x, w, config, index);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"lfm2-8b-a1b", R"({"model_type": "lfm2_moe", "num_hidden_layers": 24, "hidden_size": 2048,
      "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_attention_heads": 32,
      "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
      "vocab_size": 65536, "max_position_embeddings": 128000, "full_attn_idxs": [2, 6, 10, 14, 18, 21],
      "tie_word_embeddings": true})"},
            {"tiny-lfm2moe", R"({"model_type": "lfm2_moe", "num_hidden_layers": 3, "hidden_size": 64,
      "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
      "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1,
      "vocab_size": 640, "max_position_embeddings": 2048, "full_attn_idxs": [1],
      "tie_word_embeddings": true})"}};
  }
};

const Lfm2 kLfm2Object{};
const Lfm2Moe kLfm2MoeObject{};

}  // namespace

const Architecture& kLfm2 = kLfm2Object;
const Architecture& kLfm2Moe = kLfm2MoeObject;

}  // namespace millrace
