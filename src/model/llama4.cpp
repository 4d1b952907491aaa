// Llama 4, the text model: rotated layers that see their chunk of the context, with q and k normed, and every
// few layers one without rotation that sees everything, whose queries grow with their position; experts that
// weigh what goes in, beside a shared one, in all layers or every n-th. Meta 2025.
#include <fmt/core.h>

#include <algorithm>

#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Llama4 final : public Architecture {
 public:
  std::string_view name() const override { return "llama4"; }
  std::vector<std::string_view> model_types() const override { return {"llama4_text", "llama4"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
      "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
      "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts_per_tok": 1,
      "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": true, "no_rope_layer_interval": 4,
      "attention_chunk_size": 8192, "attn_temperature_tuning": true, "floor_scale": 8192, "attn_scale": 0.1})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    read_expert_sizes(reader, config, "num_local_experts", "intermediate_size");
    config.shared_ffn = config.expert_ffn;
    config.ffn = reader.integer("feed_forward_length", "intermediate_size_mlp", 1, 1 << 20);
    config.expert_weighting = Route::Weighting::kSigmoid;
    if (reader.is_gguf()) {
      read_gguf_dense_layers(reader, config);
      read_gguf_attention(reader, config);
    } else {
      read_hf_expert_layers(reader, config);
      read_hf_attention(reader, config);
    }
    config.rope_interleaved = true;
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    write_sizes(keys, c.ffn);
    keys.size("rope.dimension_count", c.rotary_dims);
    write_norm(keys);
    write_rope(keys);
    write_experts(keys);
    const auto sparse = std::find(c.dense_layers.begin(), c.dense_layers.end(), false);
    keys.size("interleave_moe_layer_step", sparse - c.dense_layers.begin() + 1);
    const int32_t chunk = *std::max_element(c.layer_windows.begin(), c.layer_windows.end());
    // What llama.cpp takes for granted is not written; a window of 0 means that no layer has chunks.
    if (chunk != kChunk) keys.size("attention.sliding_window", chunk);
    std::vector<bool> pattern;
    for (const int32_t w : c.layer_windows) pattern.push_back(w > 0);
    bool usual = c.unrotated_layers.size() == pattern.size();
    for (size_t l = 0; usual && l < pattern.size(); ++l) {
      usual = pattern[l] == rotated_usually(static_cast<int32_t>(l)) && c.unrotated_layers[l] != pattern[l];
    }
    if (!usual) {
      keys.flags("attention.sliding_window_pattern", pattern);
      keys.flags("rope.unrotated_layers", c.unrotated_layers);
    }
    if (has(c, "qk_norm") != qk_norm_usually(c)) keys.flag("attention.qk_norm", has(c, "qk_norm"));
    if (c.own.at("growth") != kGrowth) keys.real("attention.temperature_scale", c.own.at("growth"));
    if (c.own.at("growth_every") != kChunk)
      keys.size("attention.temperature_length", static_cast<int64_t>(c.own.at("growth_every")));
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {});
    weights.push_back(ffn_norm_weight(config));
    if (config.is_dense(layer)) {
      add_feed_forward(weights, config,
                       {.gate = "feed_forward.gate_proj.weight",
                        .up = "feed_forward.up_proj.weight",
                        .down = "feed_forward.down_proj.weight"});
      return weights;
    }
    constexpr std::string_view kBefore = "feed_forward.experts.", kBoth = "gate_up_proj";
    add_experts(weights, config,
                {.router_weight = "feed_forward.router.weight",
                 .router_bias = "feed_forward.router.bias",
                 .gate = {.fused = kBoth, .before = kBefore, .parts = 2},
                 .up = {.fused = kBoth, .first_row = config.expert_ffn, .before = kBefore, .parts = 2},
                 .down = {.fused = "down_proj", .before = kBefore}});
    add_shared_expert(weights, config,
                      {.gate = "feed_forward.shared_expert.gate_proj.weight",
                       .up = "feed_forward.shared_expert.up_proj.weight",
                       .down = "feed_forward.shared_expert.down_proj.weight"});
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    const bool rotated = config.is_rotated(index);
    NormQkv qkv = qkv_of(w, config);
    Rope rope = rope_of(config, index);
    if (rotated && has(config, "qk_norm")) {
      // Behind the rotation in the paper, which changes the length of a head by its magnitude alone.
      const float eps = config.norm_eps / (rope.magnitude * rope.magnitude);
      qkv.q_norm = qkv.k_norm = {.eps = eps, .kind = Norm::Kind::kRmsUnweighted};
      rope.magnitude = 1.0f;
    }
    x.norm_qkv(qkv);
    if (!rotated) rope.growth = {config.own.at("growth"), config.own.at("growth_every"), 1};
    x.rope_append_kv(rope);
    Attend attend = attend_of(w, config, index);
    attend.chunk = attend.window;  // the cache keeps so much of a layer, and a token sees less
    attend.window = 0;
    x.attend(attend);
    x.project_add(project_of(w, config));
    if (config.is_dense(index)) return x.ffn_add(ffn_of(w, config));
    x.route(route_of(w, config));
    Experts experts = experts_of(w, config);
    experts.weigh_input = true;
    x.experts_add(experts);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"llama-4-scout", R"({"model_type": "llama4_text", "num_hidden_layers": 48, "num_local_experts": 16,
      "num_experts_per_tok": 1, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
      "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
      "max_position_embeddings": 10485760, "rms_norm_eps": 1e-5, "rope_theta": 500000, "attention_chunk_size": 8192,
      "use_qk_norm": true, "attn_temperature_tuning": true, "floor_scale": 8192, "attn_scale": 0.1,
      "interleave_moe_layer_step": 1, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.5,
      "original_max_position_embeddings": 8192}})"},
        {"tiny-llama4", R"({"model_type": "llama4_text", "num_hidden_layers": 4, "num_local_experts": 4,
      "num_experts_per_tok": 1, "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 96,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000, "attention_chunk_size": 128,
      "use_qk_norm": true, "attn_temperature_tuning": true, "floor_scale": 64, "attn_scale": 0.1,
      "interleave_moe_layer_step": 2, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.5,
      "original_max_position_embeddings": 256}})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 private:
  static constexpr int32_t kChunk = 8192;  // also after how many tokens queries have grown once
  static constexpr float kGrowth = 0.1f;
  static bool has(const ModelConfig& config, const char* flag) { return config.own.at(flag) != 0.0f; }
  static bool rotated_usually(int32_t layer) { return (layer + 1) % 4 != 0; }
  // The model of 128 experts, Maverick, norms neither q nor k.
  static bool qk_norm_usually(const ModelConfig& config) { return config.experts != 128; }

  static std::vector<bool> gguf_flags(const ConfigReader& reader, const ModelConfig& config,
                                      std::string_view key) {
    const io::GgufArray* array = reader.checkpoint().gguf->get_array(fmt::format("llama4.{}", key));
    std::vector<bool> flags;
    if (array == nullptr) return flags;
    if (array->integers.size() != static_cast<size_t>(config.layers)) {
      reader.fail(key, fmt::format("{} entries", array->integers.size()), fmt::format("{}", config.layers));
    }
    for (const auto value : array->integers) flags.push_back(value != 0);
    return flags;
  }

  static void read_gguf_attention(const ConfigReader& reader, ModelConfig& config) {
    const int32_t chunk = reader.integer_or("attention.sliding_window", "", 0, 1 << 28, kChunk);
    std::vector<bool> chunked = gguf_flags(reader, config, "attention.sliding_window_pattern");
    config.unrotated_layers = gguf_flags(reader, config, "rope.unrotated_layers");
    const bool named = !config.unrotated_layers.empty();
    for (int32_t l = 0; l < config.layers; ++l) {
      if (static_cast<int32_t>(chunked.size()) < config.layers) chunked.push_back(rotated_usually(l));
      if (chunked[l]) config.layer_windows[l] = chunk;
      // Without chunks all layers are rotated, says llama.cpp.
      if (!named) config.unrotated_layers.push_back(chunk > 0 && !rotated_usually(l));
    }
    config.own["qk_norm"] = reader.flag_or("attention.qk_norm", "", qk_norm_usually(config)) ? 1.0f : 0.0f;
    config.own["growth"] = static_cast<float>(reader.real_or("attention.temperature_scale", "", kGrowth));
    config.own["growth_every"] =
        static_cast<float>(reader.integer_or("attention.temperature_length", "", 1, 1 << 28, kChunk));
  }

  static void read_hf_attention(const ConfigReader& reader, ModelConfig& config) {
    const auto rotated = reader.hf().find("no_rope_layers");  // named after what a 0 says
    const bool listed = rotated != reader.hf().end() && rotated->is_array() && !rotated->empty();
    const int32_t interval = reader.integer_or("", "no_rope_layer_interval", 1, 1 << 20, 4);
    if (listed && rotated->size() < static_cast<size_t>(config.layers)) {
      reader.fail("config.json: no_rope_layers", fmt::format("{} entries", rotated->size()),
                  fmt::format("{}", config.layers));
    }
    for (int32_t l = 0; l < config.layers; ++l) {
      config.unrotated_layers.push_back(listed ? (*rotated)[l] == 0 || (*rotated)[l] == false
                                               : (l + 1) % interval == 0);
    }
    const int32_t chunk = reader.integer("", "attention_chunk_size", 1, 1 << 28);
    const auto types = reader.hf().find("layer_types");
    const bool typed = types != reader.hf().end() && types->is_array();
    for (int32_t l = 0; l < config.layers; ++l) {
      const bool chunked = typed && static_cast<size_t>(l) < types->size()
                               ? (*types)[l] == "chunked_attention"
                               : config.is_rotated(l);
      config.layer_windows[l] = chunked ? chunk : 0;
    }
    config.own["qk_norm"] = reader.flag_or("", "use_qk_norm", true) ? 1.0f : 0.0f;
    const bool grows = reader.flag_or("", "attn_temperature_tuning", true);
    config.own["growth"] = grows ? static_cast<float>(reader.real_or("", "attn_scale", kGrowth)) : 0.0f;
    config.own["growth_every"] = static_cast<float>(reader.integer_or("", "floor_scale", 1, 1 << 28, kChunk));
  }

  static void read_hf_expert_layers(const ConfigReader& reader, ModelConfig& config) {
    config.dense_layers.assign(config.layers, true);
    const auto listed = reader.hf().find("moe_layers");
    if (listed == reader.hf().end() || !listed->is_array()) {
      const int32_t step = reader.integer_or("", "interleave_moe_layer_step", 1, 1 << 20, 1);
      for (int32_t l = step - 1; l < config.layers; l += step) config.dense_layers[l] = false;
      return;
    }
    for (const nlohmann::json& layer : *listed) {
      if (!layer.is_number_integer()) reader.fail("config.json: moe_layers", layer.dump(), "layer numbers");
      const auto l = layer.get<int64_t>();
      if (l >= 0 && l < config.layers) config.dense_layers[static_cast<size_t>(l)] = false;
    }
  }
};

const Llama4 kLlama4Object{};

}  // namespace

const Architecture& kLlama4 = kLlama4Object;

}  // namespace millrace
