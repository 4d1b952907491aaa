// Gemma 4, text: layers with a window between those without, each kind with heads of its own size and number
// and rotary angles of its own; queries, keys and values are normed. The last layers may read the keys and
// values of an earlier one. A small vector of each token may go to every layer besides (LayerInputs), and a
// feed-forward layer may have experts beside it. Gemma Team 2026.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <variant>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

struct Gemma4Layer final : LayerWeights {
  WeightPtr router_scale, expert_scales;                          // Route's
  WeightPtr expert_norm, experts_post_norm, shared_post_norm;     // Experts'
  WeightPtr input_gate, input_projection, input_norm, out_scale;  // EndLayer's
};

bool slides_usually(int32_t layer) { return (layer + 1) % 6 != 0; }

class Gemma4 final : public Architecture {
 public:
  std::string_view name() const override { return "gemma4"; }
  std::vector<std::string_view> model_types() const override { return {"gemma4_text", "gemma4"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 131072,
      "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
      "hidden_size_per_layer_input": 256, "attention_k_eq_v": false, "num_kv_shared_layers": 0,
      "enable_moe_block": false, "use_double_wide_mlp": false, "tie_word_embeddings": true,
      "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& c) const override {
    c.ffn_activation = c.expert_activation = Activation::kGeluTanh;
    read_outer_sizes(reader, c);
    read_norm_eps(reader, c, "rms_norm_eps", 1e-6);
    c.embedding_scale = std::sqrt(static_cast<float>(c.hidden));
    c.attention_scale = 1.0f;
    c.logit_softcap =
        static_cast<float>(reader.real_or("final_logit_softcapping", "final_logit_softcapping", 0.0));
    c.layer_input =
        reader.integer_or("embedding_length_per_layer_input", "hidden_size_per_layer_input", 0, 1 << 16, 0);
    const int32_t shared =
        reader.integer_or("attention.shared_kv_layers", "num_kv_shared_layers", 0, c.layers - 1, 0);
    std::vector<ModelConfig::HeadShape> heads;
    if (reader.is_gguf()) {
      read_gguf_windows(reader, c, slides_usually);
      heads = gguf_heads(reader, c);
    } else {
      check_hf(reader);
      read_hf_windows(reader, c, hf_window(reader), slides_usually);
      c.layer_windows.back() = 0;  // whatever layer_types says
      heads = hf_heads(reader, c);
    }
    settle_heads(reader, c, std::move(heads));
    read_shared_keys(reader, c, c.layers - shared);
    read_feed_forward(reader, c, c.layers - shared);
    read_experts(reader, c);
    read_angles(reader, c);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    const auto at = [&](bool full) { return c.heads_of(first_layer(c, full)); };
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    keys.size("attention.head_count", c.heads);
    keys.size("vocab_size", c.vocab);
    std::vector<int32_t> kv_heads, ffn;
    std::vector<bool> windows;
    for (int32_t l = 0; l < c.layers; ++l) {
      kv_heads.push_back(c.heads_of(l).kv_heads);
      ffn.push_back(ffn_of_layer(c, l));
      windows.push_back(c.layer_windows[static_cast<size_t>(l)] > 0);
    }
    const auto sizes = [&](const char* key, const std::vector<int32_t>& values) {
      const bool same = std::count(values.begin(), values.end(), values[0]) == std::ssize(values);
      same ? keys.size(key, values[0]) : keys.sizes(key, values);
    };
    sizes("feed_forward_length", ffn);
    sizes("attention.head_count_kv", kv_heads);
    for (const char* part : {"attention.key_length", "attention.value_length"}) {
      keys.size(part, at(true).head_dim);
      keys.size(std::string(part) + "_swa", at(false).head_dim);
    }
    keys.size("rope.dimension_count", at(true).head_dim);
    keys.size("rope.dimension_count_swa", at(false).head_dim);
    write_norm(keys);
    keys.real("rope.freq_base", c.rope_theta);
    keys.real("rope.freq_base_swa", c.own.at("window_theta"));
    // llama.cpp needs both, of a model without windows too.
    keys.size("attention.sliding_window", *std::max_element(c.layer_windows.begin(), c.layer_windows.end()));
    keys.flags("attention.sliding_window_pattern", windows);
    keys.size("attention.shared_kv_layers",
              c.kv_source.empty() ? 0 : c.layers - static_cast<int64_t>(c.own.at("first_shared")));
    keys.size("embedding_length_per_layer_input", c.layer_input);
    keys.flag("attention.values_are_keys", c.own.at("values_are_keys") != 0.0f);
    if (c.logit_softcap != 0.0f) keys.real("final_logit_softcapping", c.logit_softcap);
    if (c.experts > 0) write_experts(keys);
  }

  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<Gemma4Layer>(); }

  std::vector<WeightSpec> outer_weights(const ModelConfig& c) const override {
    if (c.layer_input == 0) return {};
    const int64_t cols = int64_t{c.layers} * c.layer_input;
    std::vector<WeightSpec> weights = {
        matrix_weight("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight", c.vocab, cols,
                      nullptr),
        matrix_weight("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", cols,
                      c.hidden, nullptr),
        norm_weight("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", c.layer_input,
                    nullptr)};
    weights[0].use = WeightUse::kLookup;
    weights[0].outer = &ModelWeights::layer_table;
    weights[1].outer = &ModelWeights::layer_projection;
    weights[2].outer = &ModelWeights::layer_projection_norm;
    return weights;
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    using W = LayerWeights;
    using G = Gemma4Layer;
    ModelConfig c = config;  // of this layer
    c.kv_heads = config.heads_of(layer).kv_heads;
    c.head_dim = config.heads_of(layer).head_dim;
    c.ffn = ffn_of_layer(config, layer);
    std::vector<WeightSpec> weights;
    add_attention(weights, c, {.qk_norm = true});
    std::erase_if(weights, [&](const WeightSpec& spec) {
      if (!config.has_keys(layer) && (spec.role.starts_with("attn_k") || spec.role.starts_with("attn_v")))
        return true;
      return spec.role.starts_with("attn_v") && values_are_keys(config, layer);
    });
    const auto norm = [&](std::string_view role, std::string_view hf, WeightMember to) {
      weights.push_back(norm_weight(role, hf, c.hidden, to));
    };
    norm("post_attention_norm.weight", "post_attention_layernorm.weight", &W::attn_post_norm);
    norm("ffn_norm.weight", "pre_feedforward_layernorm.weight", &W::ffn_norm);
    add_feed_forward(weights, c);
    norm("post_ffw_norm.weight", "post_feedforward_layernorm.weight", &W::ffn_post_norm);
    if (c.experts > 0) {
      norm("ffn_gate_inp.scale", "router.scale", own_weight(&G::router_scale));
      constexpr std::string_view kBoth = "experts.gate_up_proj";
      add_experts(weights, c,
                  {.router_weight = "router.proj.weight",
                   .router_bias = "router.proj.bias",
                   .gate = {.stacked = kBoth, .parts = 2},
                   .up = {.first_row = c.expert_ffn, .stacked = kBoth, .parts = 2},
                   .down = {.stacked = "experts.down_proj"}});
      weights.push_back(norm_weight("ffn_down_exps.scale", "router.per_expert_scale", c.experts,
                                    own_weight(&G::expert_scales)));
      norm("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", own_weight(&G::expert_norm));
      norm("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", own_weight(&G::shared_post_norm));
      norm("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight",
           own_weight(&G::experts_post_norm));
    }
    if (c.layer_input > 0) {
      weights.push_back(matrix_weight("inp_gate.weight", "per_layer_input_gate.weight", c.layer_input,
                                      c.hidden, own_weight(&G::input_gate)));
      weights.push_back(matrix_weight("proj.weight", "per_layer_projection.weight", c.hidden, c.layer_input,
                                      own_weight(&G::input_projection)));
      norm("post_norm.weight", "post_per_layer_input_norm.weight", own_weight(&G::input_norm));
    }
    weights.push_back(norm_weight("layer_output_scale.weight", "layer_scalar", 1, own_weight(&G::out_scale)));
    weights.back().presence = Presence::kUsual;
    return weights;
  }

  LayerInputs layer_inputs(const ModelWeights& w, const ModelConfig& c) const override {
    return {.table = w.layer_table.get(),
            .table_scale = std::sqrt(static_cast<float>(c.layer_input)),
            .projection = {w.layer_projection.get()},
            .projection_scale = 1.0f / std::sqrt(static_cast<float>(c.hidden)),
            .norm = norm_of(c, w.layer_projection_norm, {}),
            .scale = std::sqrt(0.5f)};
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    const auto& own = static_cast<const Gemma4Layer&>(w);
    NormQkv qkv = qkv_of(w, config);
    const bool keys = config.has_keys(index);
    if (values_are_keys(config, index)) qkv.v = qkv.k;
    if (keys) qkv.v_norm = {.eps = config.norm_eps, .kind = Norm::Kind::kRmsUnweighted};
    if (!config.layer_heads.empty()) qkv.head_dim = config.heads_of(index).head_dim;
    x.norm_qkv(qkv);
    Rope rope = rope_of(config, index);
    rope.appends = keys;
    x.rope_append_kv(rope);
    x.attend(attend_of(w, config, index));
    x.project_add(project_of(w, config));
    if (config.experts > 0) {
      Route route = route_of(w, config);
      route.norm = norm_of(config, own.router_scale, {});
      route.score_scale = 1.0f / std::sqrt(static_cast<float>(config.hidden));
      route.expert_scales = own.expert_scales.get();
      x.route(route);
      Experts experts = experts_of(w, config);
      experts.shared = {
          .gate = {w.ffn_gate.get()}, .up = {w.ffn_up.get()}, .down = {w.ffn_down.get()}, .mix = {}};
      experts.norm = norm_of(config, own.expert_norm, {});
      experts.experts_norm_after = norm_of(config, own.experts_post_norm, {});
      experts.shared_norm = norm_of(config, w.ffn_norm, {});
      experts.shared_norm_after = norm_of(config, own.shared_post_norm, {});
      experts.norm_after = norm_of(config, w.ffn_post_norm, {});
      x.experts_add(experts);
    } else {
      x.ffn_add(ffn_of(w, config));
    }
    if (!own.input_gate && !own.out_scale) return;
    x.end_layer({.layer = index,
                 .gate = {own.input_gate.get()},
                 .projection = {own.input_projection.get()},
                 .activation = Activation::kGeluTanh,
                 .norm_after = norm_of(config, own.input_norm, {}),
                 .scale = own.out_scale.get()});
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"gemma4-e4b", R"({"model_type": "gemma4_text", "num_hidden_layers": 42, "hidden_size": 2560,
      "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
      "global_head_dim": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "sliding_window": 512,
      "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "max_position_embeddings": 131072,
      "final_logit_softcapping": 30.0, "tie_word_embeddings": true})"},
            {"gemma4-26b-a4b", R"({"model_type": "gemma4_text", "num_hidden_layers": 30, "hidden_size": 2816,
      "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
      "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": true,
      "hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
      "moe_intermediate_size": 704, "sliding_window": 1024, "vocab_size": 262144,
      "max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "tie_word_embeddings": true})"},
            {"gemma4-31b", R"({"model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376,
      "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
      "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": true,
      "hidden_size_per_layer_input": 0, "sliding_window": 1024, "vocab_size": 262144,
      "max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "tie_word_embeddings": true})"},
            {"tiny-gemma4", R"({"model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size": 64,
      "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": true, "vocab_size": 640,
      "max_position_embeddings": 2048, "sliding_window": 32, "hidden_size_per_layer_input": 32,
      "num_kv_shared_layers": 2, "use_double_wide_mlp": true, "final_logit_softcapping": 30.0,
      "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
        "sliding_attention", "full_attention"], "tie_word_embeddings": true})"},
            {"tiny-gemma4-moe", R"({"model_type": "gemma4_text", "num_hidden_layers": 3, "hidden_size": 64,
      "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "global_head_dim": 64, "vocab_size": 640, "max_position_embeddings": 2048, "sliding_window": 32,
      "hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 8, "top_k_experts": 2,
      "moe_intermediate_size": 32, "final_logit_softcapping": 30.0, "tie_word_embeddings": true})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 private:
  // Of full attention the keys' product, before its norm, may be the values' too.
  static bool values_are_keys(const ModelConfig& c, int layer) {
    return c.own.at("values_are_keys") != 0.0f && c.layer_windows[static_cast<size_t>(layer)] == 0 &&
           c.has_keys(layer);
  }
  static int32_t ffn_of_layer(const ModelConfig& c, int32_t layer) {
    return static_cast<int32_t>(
        c.own.at(static_cast<float>(layer) < c.own.at("first_shared") ? "ffn" : "shared_ffn"));
  }
  // The first with a window or without; where there is none, the first.
  static int32_t first_layer(const ModelConfig& c, bool full) {
    const auto it = std::find_if(c.layer_windows.begin(), c.layer_windows.end(),
                                 [&](int32_t window) { return (window == 0) == full; });
    return it == c.layer_windows.end() ? 0 : static_cast<int32_t>(it - c.layer_windows.begin());
  }

  static void check_hf(const ConfigReader& reader) {
    const nlohmann::json& hf = reader.hf();
    if (hf.at("hidden_activation") != "gelu_pytorch_tanh")
      reader.fail("config.json: hidden_activation", hf.at("hidden_activation").dump(),
                  "\"gelu_pytorch_tanh\"");
    const auto both_ways = hf.find("use_bidirectional_attention");
    if (both_ways != hf.end() && *both_ways == "all")
      reader.fail("config.json: use_bidirectional_attention", "\"all\"", "null or \"vision\"");
  }

  // global_head_dim and num_global_key_value_heads, or what newer files have of each layer.
  static std::vector<ModelConfig::HeadShape> hf_heads(const ConfigReader& reader, const ModelConfig& c) {
    const nlohmann::json& hf = reader.hf();
    const ModelConfig::HeadShape usual{reader.integer("", "num_key_value_heads", 1, 1024),
                                       reader.integer("", "head_dim", 2, 1024)};
    ModelConfig::HeadShape full{usual.kv_heads, reader.integer_or("", "global_head_dim", 2, 1024, 512)};
    if (reader.flag_or("", "attention_k_eq_v", false))
      full.kv_heads = reader.integer_or("", "num_global_key_value_heads", 1, 1024, full.kv_heads);
    const auto each = hf.find("per_layer_config");
    const bool listed = each != hf.end() && each->is_object();
    std::vector<ModelConfig::HeadShape> heads;
    for (int32_t l = 0; l < c.layers; ++l) {
      heads.push_back(!listed && c.layer_windows[static_cast<size_t>(l)] == 0 ? full : usual);
      if (!listed || !each->contains(std::to_string(l))) continue;
      const nlohmann::json& of_layer = each->at(std::to_string(l));
      for (const auto& [key, value] : of_layer.items()) {
        const std::string where = fmt::format("config.json: per_layer_config.{}.{}", l, key);
        if (key != "head_dim" && key != "num_key_value_heads")
          reader.fail(where, value.dump(), "head_dim and num_key_value_heads alone");
        if (!value.is_number_integer() || value < 1 || value > 1024)
          reader.fail(where, value.dump(), "a number from 1 to 1024");
        (key == "head_dim" ? heads.back().head_dim : heads.back().kv_heads) = value.get<int32_t>();
      }
    }
    return heads;
  }

  // One number, or one per layer.
  static std::vector<int32_t> gguf_sizes(const ConfigReader& reader, const ModelConfig& c, const char* key,
                                         int32_t high) {
    const auto& metadata = reader.checkpoint().gguf->metadata();
    const auto found = metadata.find(fmt::format("gemma4.{}", key));
    const auto* array = found == metadata.end() ? nullptr : std::get_if<io::GgufArray>(&found->second);
    if (array == nullptr)
      return std::vector<int32_t>(static_cast<size_t>(c.layers), reader.integer(key, "", 1, high));
    if (array->integers.size() != static_cast<size_t>(c.layers))
      reader.fail(key, fmt::format("{} entries", array->integers.size()), fmt::format("{}", c.layers));
    for (const int64_t value : array->integers) {
      if (value < 1 || value > high) reader.fail(key, fmt::format("{}", value), fmt::format("1 to {}", high));
    }
    return {array->integers.begin(), array->integers.end()};
  }

  static std::vector<ModelConfig::HeadShape> gguf_heads(const ConfigReader& reader, const ModelConfig& c) {
    const std::vector<int32_t> kv_heads = gguf_sizes(reader, c, "attention.head_count_kv", 1024);
    const int32_t full = reader.integer("attention.key_length", "", 2, 1024);
    const int32_t window = reader.integer_or("attention.key_length_swa", "", 2, 1024, full);
    std::vector<ModelConfig::HeadShape> heads;
    for (size_t l = 0; l < kv_heads.size(); ++l)
      heads.push_back({kv_heads[l], c.layer_windows[l] > 0 ? window : full});
    for (const auto& [key, size] : {std::pair{"attention.value_length", full},
                                    {"attention.value_length_swa", window},
                                    {"rope.dimension_count", full},
                                    {"rope.dimension_count_swa", window}}) {
      const int32_t found = reader.integer_or(key, "", 1, 1024, size);
      if (found != size) reader.fail(key, fmt::format("{}", found), fmt::format("{}, as of keys", size));
    }
    return heads;
  }

  static void settle_heads(const ConfigReader& reader, ModelConfig& c,
                           std::vector<ModelConfig::HeadShape> heads) {
    bool same = true;
    for (int32_t l = 0; l < c.layers; ++l) {
      const ModelConfig::HeadShape
          &now = heads[static_cast<size_t>(l)],
          &like = heads[static_cast<size_t>(first_layer(c, c.layer_windows[static_cast<size_t>(l)] == 0))];
      if (now.kv_heads != like.kv_heads || now.head_dim != like.head_dim)
        reader.fail(fmt::format("heads of layer {}", l),
                    fmt::format("{} of {} for keys", now.kv_heads, now.head_dim),
                    fmt::format("{} of {}, as of the first layer of its kind", like.kv_heads, like.head_dim));
      if (c.heads % now.kv_heads != 0 || now.head_dim % 2 != 0)
        reader.fail(fmt::format("heads of layer {}", l), fmt::format("{} of {}", c.heads, now.head_dim),
                    fmt::format("a multiple of {} key/value heads, of an even size", now.kv_heads));
      same = same && now.kv_heads == heads[0].kv_heads && now.head_dim == heads[0].head_dim;
      if (now.head_dim > c.head_dim) {
        c.head_dim = now.head_dim;
        c.kv_heads = now.kv_heads;
      }
    }
    if (!same) c.layer_heads = std::move(heads);
  }

  // Layers from `first` on read the keys of the last one before it that is of their kind.
  static void read_shared_keys(const ConfigReader& reader, ModelConfig& c, int32_t first) {
    c.own["first_shared"] = static_cast<float>(first);
    if (first == c.layers) return;
    for (int32_t l = 0; l < c.layers; ++l) {
      int32_t source = std::min(l, first - 1);
      const auto window = [&](int32_t layer) { return c.layer_windows[static_cast<size_t>(layer)]; };
      while (l >= first && source >= 0 && window(source) != window(l)) --source;
      if (source < 0)
        reader.fail("layers with keys of their own", fmt::format("none like layer {}", l),
                    "one of its kind before it");
      c.kv_source.push_back(l < first ? l : source);
    }
  }

  static void read_feed_forward(const ConfigReader& reader, ModelConfig& c, int32_t first_shared) {
    int32_t usual = 0, shared = 0;
    if (reader.is_gguf()) {
      const std::vector<int32_t> sizes = gguf_sizes(reader, c, "feed_forward_length", 1 << 20);
      usual = sizes.front();
      shared = sizes.back();
      for (int32_t l = 0; l < c.layers; ++l) {
        const int32_t size = sizes[static_cast<size_t>(l)];
        if (size != (l < first_shared ? usual : shared))
          reader.fail("feed_forward_length", fmt::format("{} in layer {}", size, l),
                      "one size of the layers with keys, and one of the others");
      }
    } else {
      usual = shared = reader.integer("", "intermediate_size", 1, 1 << 20);
      if (first_shared < c.layers && reader.flag_or("", "use_double_wide_mlp", false)) shared = 2 * usual;
    }
    c.own["ffn"] = static_cast<float>(usual);
    c.own["shared_ffn"] = static_cast<float>(shared);
    c.ffn = std::max(usual, shared);
    // llama.cpp's files have no such key: their tensors show it.
    const std::string values = fmt::format("blk.{}.attn_v.weight", first_layer(c, true));
    const bool shown = reader.is_gguf() && reader.checkpoint().find_tensor(values) == nullptr;
    const bool as_keys = reader.flag_or("attention.values_are_keys", "attention_k_eq_v", shown);
    c.own["values_are_keys"] = as_keys ? 1.0f : 0.0f;
  }

  static void read_experts(const ConfigReader& reader, ModelConfig& c) {
    if (!reader.is_gguf() && !reader.flag_or("", "enable_moe_block", false)) return;
    c.experts = reader.is_gguf() ? reader.integer_or("expert_count", "", 0, 4096, 0)
                                 : reader.integer("", "num_experts", 1, 4096);
    if (c.experts == 0) return;
    c.experts_per_token = reader.integer("expert_used_count", "top_k_experts", 1, c.experts);
    c.expert_ffn = reader.integer("expert_feed_forward_length", "moe_intermediate_size", 1, 1 << 20);
    c.expert_weighting = Route::Weighting::kSoftmaxAllRenormalized;
    c.expert_norms = true;
    c.shared_ffn = c.ffn;
  }

  // The first part of the angles of a head's whole size; the rest of it does not turn.
  static std::vector<float> proportional(double theta, int32_t dims, double part, double factor) {
    std::vector<float> angles = plain_angles(theta, dims);
    const auto turned = static_cast<size_t>(part * dims / 2);
    for (size_t i = 0; i < angles.size(); ++i)
      angles[i] = i < turned
                      ? static_cast<float>(std::pow(theta, -2.0 * static_cast<double>(i) / dims) / factor)
                      : 0.0f;
    return angles;
  }

  static void read_angles(const ConfigReader& reader, ModelConfig& c) {
    const int32_t full = c.heads_of(first_layer(c, true)).head_dim;
    const int32_t window = c.heads_of(first_layer(c, false)).head_dim;
    c.rotary_dims = full;
    double window_theta = 10000.0;
    if (reader.is_gguf()) {
      c.rope_theta = reader.real_or("rope.freq_base", "", 1e6);
      window_theta = reader.real_or("rope.freq_base_swa", "", window_theta);
      c.rope_inv_freq = plain_angles(c.rope_theta, full);
      const std::vector<double> divisors = gguf_divisors(reader, "rope_freqs.weight", c.rope_inv_freq.size());
      constexpr double kNever = 1e29;  // llama.cpp's files have 1e30 for dimensions that do not turn
      for (size_t i = 0; i < divisors.size(); ++i) {
        if (!(divisors[i] > 0))
          reader.fail("rope_freqs.weight", fmt::format("{}", divisors[i]), "positive numbers");
        c.rope_inv_freq[i] =
            divisors[i] > kNever ? 0.0f : static_cast<float>(c.rope_inv_freq[i] / divisors[i]);
      }
      c.rope_window_inv_freq = plain_angles(window_theta, window);
    } else {
      const auto read = [&](const char* kind, int32_t dims, double& theta) {
        const nlohmann::json& both = reader.hf().at("rope_parameters");
        const std::string where = fmt::format("config.json: rope_parameters.{}", kind);
        if (!both.is_object() || !both.contains(kind) || !both.at(kind).is_object())
          reader.fail(where, "nothing", "an object");
        const nlohmann::json& of_kind = both.at(kind);
        const nlohmann::json type = of_kind.value("rope_type", nlohmann::json("default"));
        theta = reader.hf_real(of_kind, "rope_theta");
        if (!(theta > 1)) reader.fail(where + ".rope_theta", fmt::format("{}", theta), "above 1");
        if (type == "default") return plain_angles(theta, dims);
        if (type != "proportional")
          reader.fail(where + ".rope_type", type.dump(), "\"default\" or \"proportional\"");
        const double part = reader.hf_real_or(of_kind, "partial_rotary_factor", 1.0);
        const double factor = reader.hf_real_or(of_kind, "factor", 1.0);
        if (!(part > 0 && part <= 1) || !(factor > 0))
          reader.fail(where, of_kind.dump(), "a part of 0 to 1 and a factor above 0");
        return proportional(theta, dims, part, factor);
      };
      c.rope_inv_freq = read("full_attention", full, c.rope_theta);
      const bool slides = first_layer(c, false) != first_layer(c, true);
      c.rope_window_inv_freq =
          slides ? read("sliding_attention", window, window_theta) : plain_angles(window_theta, window);
      if (slides && c.rope_window_inv_freq != plain_angles(window_theta, window))
        reader.fail("config.json: rope_parameters.sliding_attention", "part of a head, or a factor",
                    "all of it");
    }
    c.own["window_theta"] = static_cast<float>(window_theta);
    c.rope_as_tensor = c.rope_inv_freq != plain_angles(c.rope_theta, full);
  }
};

const Gemma4 kGemma4Object{};

}  // namespace

const Architecture& kGemma4 = kGemma4Object;

}  // namespace millrace
