#include "model/decoder_config.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {

void read_outer_sizes(const ConfigReader& reader, ModelConfig& config) {
  // Ranges are what int32 sizes can multiply to without overflow, far above any published model.
  config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
  config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
  config.heads = reader.integer("attention.head_count", "num_attention_heads", 1, 1024);
  config.context_length = reader.integer("context_length", "max_position_embeddings", 1, 1 << 28);
  config.layer_windows.assign(static_cast<size_t>(config.layers), 0);
}

void check_heads(const ConfigReader& reader, const ModelConfig& config) {
  if (config.heads % config.kv_heads == 0) return;
  reader.fail("attention heads", fmt::format("{}", config.heads),
              fmt::format("a multiple of {} key/value heads", config.kv_heads));
}

void read_norm_eps(const ConfigReader& reader, ModelConfig& config, std::string_view hf, double usual) {
  config.norm_eps = static_cast<float>(reader.real_or("attention.layer_norm_rms_epsilon", hf, usual));
  if (config.norm_eps > 0) return;
  reader.fail(hf == "rms_norm_eps" ? "rms norm epsilon" : "norm epsilon", fmt::format("{}", config.norm_eps),
              "above 0");
}

void read_sizes(const ConfigReader& reader, ModelConfig& config) {
  read_outer_sizes(reader, config);
  config.kv_heads =
      reader.integer_or("attention.head_count_kv", "num_key_value_heads", 1, 1024, config.heads);
  config.head_dim =
      reader.integer_or("attention.key_length", "head_dim", 1, 1024, config.hidden / config.heads);
  const int32_t value_dim = reader.integer_or("attention.value_length", "", 1, 1024, config.head_dim);
  if (value_dim != config.head_dim) {
    reader.fail("attention.value_length", fmt::format("{}", value_dim),
                fmt::format("key_length, {}", config.head_dim));
  }
  check_heads(reader, config);
}

void read_decoder(const ConfigReader& reader, ModelConfig& config) {
  read_sizes(reader, config);
  read_norm_eps(reader, config, "rms_norm_eps");
  if (config.ffn_activation == Activation::kSilu) expect_silu(reader);
}

void expect_silu(const ConfigReader& reader) {
  if (reader.is_gguf()) return;
  const auto activation = reader.hf().find("hidden_act");
  if (activation != reader.hf().end() && *activation != "silu" && *activation != "swish") {
    reader.fail("config.json: hidden_act", activation->dump(), "\"silu\"");
  }
}

namespace {

// config.json's layer_types, one for each layer; null when it has none.
const nlohmann::json* find_layer_types(const ConfigReader& reader, const ModelConfig& config) {
  const auto types = reader.hf().find("layer_types");
  if (types == reader.hf().end() || types->is_null()) return nullptr;
  if (!types->is_array() || types->size() != static_cast<size_t>(config.layers))
    reader.fail("config.json: layer_types",
                types->is_array() ? fmt::format("{} entries", types->size()) : "no list",
                fmt::format("{}", config.layers));
  return &*types;
}

// False when config.json has no layer_types.
bool read_layer_types(const ConfigReader& reader, ModelConfig& config, int32_t window) {
  const nlohmann::json* types = find_layer_types(reader, config);
  if (types == nullptr) return false;
  for (int32_t l = 0; l < config.layers; ++l) {
    const nlohmann::json& type = (*types)[l];
    if (type == "sliding_attention") {
      if (window == 0)
        reader.fail("config.json: layer_types", "sliding_attention", "a sliding_window for it");
      config.layer_windows[l] = window;
    } else if (type != "full_attention") {
      reader.fail(fmt::format("config.json: layer_types[{}]", l), type.dump(),
                  "full_attention or sliding_attention");
    }
  }
  return true;
}

}  // namespace

bool read_hf_state_layers(const ConfigReader& reader, ModelConfig& config,
                          std::initializer_list<std::string_view> states,
                          std::initializer_list<std::string_view> attending, std::string_view expected) {
  config.state_layers.assign(static_cast<size_t>(config.layers), false);
  const nlohmann::json* types = find_layer_types(reader, config);
  if (types == nullptr) return false;
  const auto is_of = [](const nlohmann::json& type, std::initializer_list<std::string_view> kinds) {
    return std::any_of(kinds.begin(), kinds.end(), [&](std::string_view kind) { return type == kind; });
  };
  for (int32_t l = 0; l < config.layers; ++l) {
    const nlohmann::json& type = (*types)[static_cast<size_t>(l)];
    const bool state = is_of(type, states);
    if (!state && !is_of(type, attending))
      reader.fail(fmt::format("config.json: layer_types[{}]", l), type.dump(), std::string(expected));
    config.state_layers[static_cast<size_t>(l)] = state;
  }
  return true;
}

SlidingRule gguf_sliding_rule(const ConfigReader& reader, const ModelConfig& config, SlidingRule usual) {
  constexpr std::string_view kKey = "attention.sliding_window_pattern";
  const auto& keys = reader.checkpoint().gguf->metadata();
  const auto found = keys.find(fmt::format("{}.{}", config.architecture, kKey));
  if (found == keys.end()) return usual;
  if (const auto* flags = std::get_if<io::GgufArray>(&found->second)) {
    if (flags->integers.size() != static_cast<size_t>(config.layers))
      reader.fail(kKey, fmt::format("{} entries", flags->integers.size()), fmt::format("{}", config.layers));
    return [flags](int32_t l) { return flags->integers[static_cast<size_t>(l)] != 0; };
  }
  const int32_t every = reader.integer(kKey, "", 0, 1024);
  return [every](int32_t l) { return every == 0 || l % every < every - 1; };
}

void read_gguf_windows(const ConfigReader& reader, ModelConfig& config, const SlidingRule& usual,
                       int32_t usual_window) {
  const int32_t window = reader.integer_or("attention.sliding_window", "", 0, 1 << 28, usual_window);
  const SlidingRule slides = gguf_sliding_rule(reader, config, usual);
  for (int32_t l = 0; l < config.layers; ++l) {
    if (slides(l)) config.layer_windows[l] = window;
  }
}

void read_hf_windows(const ConfigReader& reader, ModelConfig& config, int32_t window,
                     const SlidingRule& slides) {
  if (read_layer_types(reader, config, window)) return;
  for (int32_t l = 0; l < config.layers; ++l) {
    if (slides(l)) config.layer_windows[l] = window;
  }
}

int32_t hf_window(const ConfigReader& reader) {
  return reader.integer_or("", "sliding_window", 1, 1 << 28, 0);
}

void read_qwen_windows(const ConfigReader& reader, ModelConfig& config) {
  if (reader.is_gguf()) return read_gguf_windows(reader, config, [](int32_t) { return false; });
  const int32_t window = reader.flag_or("", "use_sliding_window", false) ? hf_window(reader) : 0;
  const int32_t first = reader.integer_or("", "max_window_layers", 0, 1 << 20, 0);
  read_hf_windows(reader, config, window, [first](int32_t l) { return l >= first; });
}

void write_windows(GgufKeys& keys, const SlidingRule& slides) {
  const std::vector<int32_t>& windows = keys.config().layer_windows;
  const int32_t window = *std::max_element(windows.begin(), windows.end());
  if (window == 0) return;
  keys.size("attention.sliding_window", window);
  std::vector<bool> pattern;
  for (const int32_t w : windows) pattern.push_back(w > 0);
  for (size_t l = 0; l < pattern.size(); ++l) {
    if (pattern[l] != slides(static_cast<int32_t>(l))) {
      return keys.flags("attention.sliding_window_pattern", pattern);
    }
  }
}

void read_gguf_dense_layers(const ConfigReader& reader, ModelConfig& config) {
  config.dense_layers.assign(config.layers, false);
  for (int32_t l = 0; l < config.layers; ++l) {
    config.dense_layers[l] =
        reader.checkpoint().find_tensor(fmt::format("blk.{}.ffn_gate.weight", l)) != nullptr;
  }
}

void read_qwen_expert_layers(const ConfigReader& reader, ModelConfig& config) {
  if (reader.is_gguf()) {
    read_gguf_dense_layers(reader, config);
  } else {
    config.dense_layers.assign(config.layers, false);
    const int32_t step = reader.integer_or("", "decoder_sparse_step", 1, 1 << 20, 1);
    for (int32_t l = 0; l < config.layers; ++l) config.dense_layers[l] = (l + 1) % step != 0;
    const auto listed = reader.hf().find("mlp_only_layers");
    if (listed != reader.hf().end() && listed->is_array()) {
      for (const nlohmann::json& layer : *listed) {
        if (!layer.is_number_integer())
          reader.fail("config.json: mlp_only_layers", layer.dump(), "layer numbers");
        const auto l = layer.get<int64_t>();
        if (l >= 0 && l < config.layers) config.dense_layers[static_cast<size_t>(l)] = true;
      }
    }
  }
  const bool any =
      std::find(config.dense_layers.begin(), config.dense_layers.end(), true) != config.dense_layers.end();
  if (any) config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
}

void read_expert_sizes(const ConfigReader& reader, ModelConfig& config, std::string_view hf_count,
                       std::string_view hf_size) {
  config.experts = reader.integer("expert_count", hf_count, 1, 4096);
  config.experts_per_token = reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
  config.expert_ffn = reader.integer("expert_feed_forward_length", hf_size, 1, 1 << 20);
}

void read_sigmoid_weighting(const ConfigReader& reader, ModelConfig& config) {
  config.expert_weighting = reader.flag_or("expert_weights_norm", "norm_topk_prob", true)
                                ? Route::Weighting::kSigmoidRenormalized
                                : Route::Weighting::kSigmoid;
}

void read_expert_scale(const ConfigReader& reader, ModelConfig& config) {
  config.expert_scale =
      static_cast<float>(reader.real_or("expert_weights_scale", "routed_scaling_factor", 1.0));
}

void read_expert_groups(const ConfigReader& reader, ModelConfig& config) {
  config.expert_groups = reader.integer_or("expert_group_count", "n_group", 1, config.experts, 1);
  config.expert_groups_chosen =
      reader.integer_or("expert_group_used_count", "topk_group", 1, config.expert_groups, 1);
}

void read_deepseek_experts(const ConfigReader& reader, ModelConfig& config, bool softmax) {
  read_expert_sizes(reader, config, "n_routed_experts");
  config.shared_ffn =
      reader.integer_or("expert_shared_count", "n_shared_experts", 1, 64, 1) * config.expert_ffn;
  constexpr int32_t kSoftmax = 1, kSigmoid = 2;
  const int32_t usual = softmax ? kSoftmax : kSigmoid;
  const int32_t gating = reader.integer_or("expert_gating_func", "", 0, 1 << 20, usual);
  if (gating != kSigmoid && !(softmax && gating <= kSoftmax)) {
    throw_error(ErrorCode::kUnsupported, "{}: expert_gating_func: found {}, expected {}{} (sigmoid)",
                reader.checkpoint().path(), gating, softmax ? "1 (softmax) or " : "", kSigmoid);
  }
  if (gating == kSigmoid) {
    read_sigmoid_weighting(reader, config);
  } else {
    config.expert_weighting = reader.flag_or("expert_weights_norm", "", false)
                                  ? Route::Weighting::kSoftmaxAllRenormalized
                                  : Route::Weighting::kSoftmaxAll;
  }
  read_expert_scale(reader, config);
  read_expert_groups(reader, config);
  const int32_t per_group = config.experts / config.expert_groups;
  if (config.experts % config.expert_groups != 0 || (config.expert_groups > 1 && per_group < 2) ||
      config.experts_per_token > per_group * config.expert_groups_chosen) {
    reader.fail("groups of experts",
                fmt::format("{} of {}, {} experts of {} chosen", config.expert_groups_chosen,
                            config.expert_groups, config.experts_per_token, config.experts),
                "groups of one size, of two experts at least, with enough in those chosen");
  }
  config.dense_layers.assign(config.layers, false);
  const int32_t dense = reader.integer_or("leading_dense_block_count", "first_k_dense_replace", 0, 1024, 0);
  for (int32_t l = 0; l < std::min(dense, config.layers); ++l) config.dense_layers[l] = true;
  if (dense > 0) config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
}

void write_deepseek_experts(GgufKeys& keys) {
  const ModelConfig& c = keys.config();
  write_experts(keys);
  keys.size("expert_shared_count", c.shared_ffn / c.expert_ffn);
  const bool sigmoid = c.expert_weighting == Route::Weighting::kSigmoid ||
                       c.expert_weighting == Route::Weighting::kSigmoidRenormalized;
  keys.size("expert_gating_func", sigmoid ? 2 : 1);
  keys.flag("expert_weights_norm", c.expert_weighting == Route::Weighting::kSigmoidRenormalized ||
                                       c.expert_weighting == Route::Weighting::kSoftmaxAllRenormalized);
  keys.real("expert_weights_scale", c.expert_scale);
  keys.size("expert_group_count", c.expert_groups);
  keys.size("expert_group_used_count", c.expert_groups_chosen);
  keys.size("leading_dense_block_count", std::count(c.dense_layers.begin(), c.dense_layers.end(), true));
}

void write_experts(GgufKeys& keys) {
  keys.size("expert_count", keys.config().experts);
  keys.size("expert_used_count", keys.config().experts_per_token);
  keys.size("expert_feed_forward_length", keys.config().expert_ffn);
}

void write_sizes(GgufKeys& keys, int64_t feed_forward, bool kv_heads) {
  const ModelConfig& c = keys.config();
  keys.size("block_count", c.layers);
  keys.size("context_length", std::max(c.context_length, c.rope_long_context));
  keys.size("embedding_length", c.hidden);
  keys.size("feed_forward_length", feed_forward);
  keys.size("attention.head_count", c.heads);
  if (kv_heads) keys.size("attention.head_count_kv", c.kv_heads);
  keys.size("attention.key_length", c.head_dim);
  keys.size("attention.value_length", c.latent.rank > 0 ? c.latent.rank : c.head_dim);
  keys.size("vocab_size", c.vocab);
}

void write_norm(GgufKeys& keys) { keys.real("attention.layer_norm_rms_epsilon", keys.config().norm_eps); }

void read_multipliers(const ConfigReader& reader, ModelConfig& config) {
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
}

}  // namespace millrace
