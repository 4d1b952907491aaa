#include "model/architecture.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {

std::span<const Architecture> architectures() {
  static const std::array kAll = {kLlama, kQwen2, kQwen3, kQwen3Moe, kGptOss};
  return kAll;
}

const Architecture& find_architecture(const io::Checkpoint& checkpoint) {
  std::string found;
  if (checkpoint.gguf) {
    found = checkpoint.gguf->get_string("general.architecture");
  } else {
    const auto it = checkpoint.hf->config.find("model_type");
    if (it != checkpoint.hf->config.end() && it->is_string()) found = it->get<std::string>();
  }
  std::string known;
  for (const Architecture& a : architectures()) {
    if (checkpoint.gguf && a.name == found) return a;
    for (const std::string_view type : a.model_types) {
      if (checkpoint.hf && type == found) return a;
      if (checkpoint.hf) known += (known.empty() ? "" : ", ") + std::string(type);
    }
    if (checkpoint.gguf) known += (known.empty() ? "" : ", ") + std::string(a.name);
  }
  throw_error(ErrorCode::kUnsupported, "{}: {}: found \"{}\", expected one of {}", checkpoint.path(),
              checkpoint.gguf ? "general.architecture" : "config.json: model_type", found, known);
}

void read_common(const ConfigReader& reader, ModelConfig& config) {
  // Ranges are what int32 sizes can multiply to without overflow, far above any published model.
  config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
  config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
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

NormQkv qkv_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = {w.attn_norm.get(), config.norm_eps},
          .q = {w.attn_q.get(), w.attn_q_bias.get()},
          .k = {w.attn_k.get(), w.attn_k_bias.get()},
          .v = {w.attn_v.get(), w.attn_v_bias.get()},
          .q_norm = {w.attn_q_norm.get(), config.norm_eps},
          .k_norm = {w.attn_k_norm.get(), config.norm_eps}};
}

Rope rope_of(const ModelConfig& config, int layer) {
  return {.layer = layer,
          .inv_freq = config.rope_inv_freq,
          .magnitude = config.rope_magnitude,
          .interleaved = config.rope_interleaved};
}

Attend attend_of(const LayerWeights& w, const ModelConfig& config, int layer) {
  return {.layer = layer,
          .window = config.layer_windows[layer],
          .scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim)),
          .sinks = w.attn_sinks.get()};
}

Ffn ffn_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = {w.ffn_norm.get(), config.norm_eps},
          .gate = {w.ffn_gate.get(), w.ffn_gate_bias.get()},
          .up = {w.ffn_up.get(), w.ffn_up_bias.get()},
          .down = {w.ffn_down.get(), w.ffn_down_bias.get()}};
}

Route route_of(const LayerWeights& w, const ModelConfig& config) {
  return {.norm = {w.ffn_norm.get(), config.norm_eps},
          .router = {w.router.get(), w.router_bias.get()},
          .experts_per_token = config.experts_per_token,
          .weighting = config.expert_weighting};
}

Experts experts_of(const LayerWeights& w, const ModelConfig& config) {
  return {.gate = {w.gate_experts.get(), w.gate_experts_bias.get()},
          .up = {w.up_experts.get(), w.up_experts_bias.get()},
          .down = {w.down_experts.get(), w.down_experts_bias.get()},
          .activation = config.expert_activation,
          .alpha = config.swiglu_alpha,
          .limit = config.swiglu_limit};
}

}  // namespace millrace
