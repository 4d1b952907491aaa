// Llama (2 and 3), Mistral, Ministral, SmolLM2, TinyLlama: pre-norm, rotary positions, grouped-query
// attention, SwiGLU; and Mixtral, which GGUF files call llama too: the same with experts. Touvron et al.
// 2023; Dubey et al. 2024; Jiang et al. 2023 (sliding window) and 2024 (experts).
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Llama final : public Architecture {
 public:
  std::string_view name() const override { return "llama"; }
  std::vector<std::string_view> model_types() const override {
    return {"llama", "mistral", "ministral", "mixtral"};
  }

  std::string_view hf_defaults(std::string_view model_type) const override {
    if (model_type == "mistral" || model_type == "ministral") {
      return R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096})";
    }
    if (model_type == "mixtral") {
      return R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "num_experts_per_tok": 2, "num_local_experts": 8})";
    }
    return R"({"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6})";
  }

  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_experts", "num_local_experts"}};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    const int32_t ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    const bool mixtral = !reader.is_gguf() && reader.hf().at("model_type") == "mixtral";
    if (reader.is_gguf() || mixtral) {
      config.experts = reader.integer_or("expert_count", "num_local_experts", 0, 4096, 0);
    }
    if (config.experts > 0) {
      config.experts_per_token =
          reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
      config.expert_ffn = ffn;
      config.expert_weighting = Route::Weighting::kSoftmaxAllRenormalized;
    } else {
      config.ffn = ffn;
    }
    // GGUF's converter reorders q and k so that rotated pairs are neighbours; Hugging Face keeps halves.
    config.rope_interleaved = reader.is_gguf();
    if (reader.is_gguf()) {
      read_gguf_windows(reader, config, every_layer);
    } else if (mixtral || reader.hf().at("model_type") == "mistral") {  // Llama's class knows no windows
      config.layer_windows.assign(config.layers, hf_window(reader));
    } else if (reader.hf().at("model_type") == "ministral") {  // Mistral with windows on some layers
      read_hf_windows(reader, config, hf_window(reader), every_layer);
    }
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& config = keys.config();
    write_sizes(keys, config.experts > 0 ? config.expert_ffn : config.ffn);
    if (config.experts > 0) write_experts(keys);
    keys.size("rope.dimension_count", config.head_dim);
    write_norm(keys);
    write_rope(keys);
    write_windows(keys, every_layer);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.interleaved_in_gguf = true});
    weights.push_back(ffn_norm_weight(config));
    if (config.experts == 0) {
      add_feed_forward(weights, config);
      return weights;
    }
    constexpr std::string_view kBefore = "block_sparse_moe.experts.", kBoth = "mlp.experts.gate_up_proj";
    add_experts(weights, config,
                {.router_weight = "block_sparse_moe.gate.weight",
                 .router_bias = "block_sparse_moe.gate.bias",
                 .gate = {.single = "w1", .before = kBefore, .stacked = kBoth, .parts = 2},
                 .up = {.single = "w3",
                        .first_row = config.expert_ffn,
                        .before = kBefore,
                        .stacked = kBoth,
                        .parts = 2},
                 .down = {.single = "w2", .before = kBefore, .stacked = "mlp.experts.down_proj"},
                 .router_also = "mlp.gate.weight"});
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));
    x.project_add(project_of(w, config));
    if (config.experts == 0) return x.ffn_add(ffn_of(w, config));
    x.route(route_of(w, config));
    x.experts_add(experts_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"smollm2-135m", R"({"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
      "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
      "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": true})"},
            {"llama-3.2-1b", R"({"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
      "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
      "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000,
      "tie_word_embeddings": true, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})"},
            {"mixtral-8x7b", R"({"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
      "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
      "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
      "rope_theta": 1000000, "tie_word_embeddings": false})"},
            {"tiny-mixtral", R"({"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
      "num_experts_per_tok": 2, "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
      "rope_theta": 1000000, "sliding_window": 128, "tie_word_embeddings": false})"},
            {"tiny-llama", R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": true,
      "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 256}})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("llama-bpe", vocab);
  }

 private:
  static bool every_layer(int32_t) { return true; }
};

const Llama kLlamaObject{};

}  // namespace

const Architecture& kLlama = kLlamaObject;

}  // namespace millrace
