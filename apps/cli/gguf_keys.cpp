// A config.json as the keys that llama.cpp's converter makes of it.
#include "gguf_keys.h"

#include "io/hf_directory.h"
#include "model/config_reader.h"

namespace millrace::cli {

void write_config_keys(const nlohmann::json& config, const std::string& source,
                       const std::string& architecture, int64_t vocab, io::GgufWriter& writer) {
  io::Checkpoint checkpoint;
  checkpoint.hf = std::make_shared<io::HfDirectory>();
  checkpoint.hf->path = source;
  checkpoint.hf->config = config;
  const ConfigReader read(checkpoint, "");
  const auto key = [&](const char* name) { return architecture + "." + name; };
  const auto size = [&](const char* name, int64_t value) {
    writer.set_u32(key(name), static_cast<uint32_t>(value));
  };
  const auto copy = [&](const char* name, const char* field, int64_t high) {
    const int64_t value = read.integer("", field, 1, high);
    size(name, value);
    return value;
  };
  copy("block_count", "num_hidden_layers", 1024);
  copy("context_length", "max_position_embeddings", 1 << 28);
  const int64_t hidden = copy("embedding_length", "hidden_size", 1 << 20);
  copy("feed_forward_length", "intermediate_size", 1 << 20);
  const int64_t heads = copy("attention.head_count", "num_attention_heads", 4096);
  size("attention.head_count_kv", read.integer_or("", "num_key_value_heads", 1, 4096, heads));
  const int64_t head_dim = read.integer_or("", "head_dim", 2, 4096, hidden / heads);
  size("attention.key_length", head_dim);
  size("attention.value_length", head_dim);
  size("vocab_size", vocab);
  if (architecture == "llama") size("rope.dimension_count", head_dim);
  writer.set_f32(key("attention.layer_norm_rms_epsilon"),
                 static_cast<float>(read.real_or("", "rms_norm_eps", 1e-5)));

  nlohmann::json rope = nlohmann::json::object();
  for (const char* field : {"rope_scaling", "rope_parameters"}) {
    if (const auto it = config.find(field); it != config.end() && it->is_object()) rope = *it;
  }
  const double theta = read.real_or("", "rope_theta", 10000.0);
  writer.set_f32(key("rope.freq_base"), static_cast<float>(read.hf_real_or(rope, "rope_theta", theta)));
  const std::string type = rope.value("rope_type", rope.value("type", std::string("default")));
  if (type == "yarn" || type == "linear") {
    writer.set_string(key("rope.scaling.type"), type);
    writer.set_f32(key("rope.scaling.factor"), static_cast<float>(read.hf_real(rope, "factor")));
  }
  if (type == "yarn") {
    size("rope.scaling.original_context_length",
         static_cast<int64_t>(read.hf_real(rope, "original_max_position_embeddings")));
  }
  if (architecture == "gpt-oss") {
    copy("expert_count", "num_local_experts", 4096);
    copy("expert_used_count", "num_experts_per_tok", 4096);
    copy("expert_feed_forward_length", "intermediate_size", 1 << 20);
    copy("attention.sliding_window", "sliding_window", 1 << 28);
  } else if (architecture == "qwen3moe") {
    copy("expert_count", "num_experts", 4096);
    copy("expert_used_count", "num_experts_per_tok", 4096);
    copy("expert_feed_forward_length", "moe_intermediate_size", 1 << 20);
  }
}

}  // namespace millrace::cli
