#include "synth/presets.h"

#include <array>

namespace millrace::cli {
namespace {

struct Preset {
  std::string_view name, config;
};

// The published shapes, and tiny ones with every feature of their architecture on, for tests.
constexpr std::array kPresets = {
    Preset{"gpt-oss-20b", R"({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
      "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
      "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}})"},
    Preset{"gpt-oss-120b", R"({"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128,
      "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
      "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}})"},
    Preset{"smollm2-135m", R"({"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
      "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
      "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": true})"},
    Preset{"llama-3.2-1b", R"({"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
      "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
      "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000,
      "tie_word_embeddings": true, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})"},
    Preset{"qwen3-30b-a3b", R"({"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
      "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
      "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": true,
      "tie_word_embeddings": false})"},
    Preset{"tiny-gpt-oss", R"({"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640, "max_position_embeddings": 2048,
      "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": false,
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}})"},
    Preset{"tiny-llama", R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": true,
      "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 256}})"},
    Preset{"tiny-qwen2", R"({"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": true})"},
    Preset{"tiny-qwen3", R"({"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
      "tie_word_embeddings": false})"},
    Preset{"tiny-qwen3moe", R"({"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "norm_topk_prob": true,
      "tie_word_embeddings": false})"},
};

}  // namespace

std::optional<nlohmann::json> find_preset(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name == name) return nlohmann::json::parse(preset.config);
  }
  return std::nullopt;
}

std::string preset_names() {
  std::string names;
  for (const Preset& preset : kPresets) names += (names.empty() ? "" : ", ") + std::string(preset.name);
  return names;
}

}  // namespace millrace::cli
