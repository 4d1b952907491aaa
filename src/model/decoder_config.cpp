#include "model/decoder_config.h"

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {

void read_decoder(const ConfigReader& reader, ModelConfig& config) {
  // Ranges are what int32 sizes can multiply to without overflow, far above any published model.
  config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
  config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
  config.heads = reader.integer("attention.head_count", "num_attention_heads", 1, 1024);
  config.kv_heads =
      reader.integer_or("attention.head_count_kv", "num_key_value_heads", 1, 1024, config.heads);
  config.head_dim =
      reader.integer_or("attention.key_length", "head_dim", 1, 1024, config.hidden / config.heads);
  const int32_t value_dim = reader.integer_or("attention.value_length", "", 1, 1024, config.head_dim);
  if (value_dim != config.head_dim) {
    reader.fail("attention.value_length", fmt::format("{}", value_dim),
                fmt::format("key_length, {}", config.head_dim));
  }
  if (config.heads % config.kv_heads != 0) {
    reader.fail("attention heads", fmt::format("{}", config.heads),
                fmt::format("a multiple of {} key/value heads", config.kv_heads));
  }
  config.context_length = reader.integer("context_length", "max_position_embeddings", 1, 1 << 28);
  config.norm_eps =
      static_cast<float>(reader.real_or("attention.layer_norm_rms_epsilon", "rms_norm_eps", 1e-5));
  if (!(config.norm_eps > 0)) reader.fail("rms norm epsilon", fmt::format("{}", config.norm_eps), "above 0");
  if (!reader.is_gguf()) {
    const auto activation = reader.hf().find("hidden_act");
    if (activation != reader.hf().end() && *activation != "silu" && *activation != "swish") {
      reader.fail("config.json: hidden_act", activation->dump(), "\"silu\"");
    }
  }
  config.layer_windows.assign(config.layers, 0);
}

bool read_hf_layer_types(const ConfigReader& reader, ModelConfig& config) {
  if (reader.is_gguf()) return false;
  const auto types = reader.hf().find("layer_types");
  if (types == reader.hf().end() || !types->is_array()) {
    // Older Qwen files: the layers from max_window_layers on slide, when use_sliding_window says so.
    const auto use = reader.hf().find("use_sliding_window");
    if (use == reader.hf().end() || *use != true) return false;
    for (int32_t l = reader.integer("", "max_window_layers", 0, 1024); l < config.layers; ++l) {
      config.layer_windows[l] = reader.integer("", "sliding_window", 1, 1 << 28);
    }
    return true;
  }
  if (types->size() != static_cast<size_t>(config.layers)) {
    reader.fail("config.json: layer_types", fmt::format("{} entries", types->size()),
                fmt::format("{}", config.layers));
  }
  for (int32_t l = 0; l < config.layers; ++l) {
    const nlohmann::json& type = (*types)[l];
    if (type == "sliding_attention") {
      config.layer_windows[l] = reader.integer("", "sliding_window", 1, 1 << 28);
    } else if (type != "full_attention") {
      reader.fail(fmt::format("config.json: layer_types[{}]", l), type.dump(),
                  "full_attention or sliding_attention");
    }
  }
  return true;
}

void write_sizes(GgufKeys& keys, int64_t feed_forward) {
  const ModelConfig& c = keys.config();
  keys.size("block_count", c.layers);
  keys.size("context_length", c.context_length);
  keys.size("embedding_length", c.hidden);
  keys.size("feed_forward_length", feed_forward);
  keys.size("attention.head_count", c.heads);
  keys.size("attention.head_count_kv", c.kv_heads);
  keys.size("attention.key_length", c.head_dim);
  keys.size("attention.value_length", c.head_dim);
  keys.size("vocab_size", c.vocab);
}

void write_norm(GgufKeys& keys) { keys.real("attention.layer_norm_rms_epsilon", keys.config().norm_eps); }

}  // namespace millrace
