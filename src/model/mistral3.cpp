// Ministral 3, and the text models inside Mistral 3's that see: Mistral, whose queries grow with their
// position. Mistral AI 2025.
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/dense_decoder.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Mistral3 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "mistral3"; }
  std::vector<std::string_view> model_types() const override { return {"ministral3"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32,
      "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
      "rope_parameters": {"type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
      "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0,
      "mscale": 1.0, "llama_4_scaling_beta": 0.1}})";
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    Rope rope = rope_of(config, index);
    rope.growth = query_growth(config);
    x.rope_append_kv(rope);
    x.attend(attend_of(w, config, index));
    x.project_add(project_of(w, config));
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"ministral-3-8b", R"({"model_type": "ministral3", "vocab_size": 131072})"},
            {"tiny-ministral3", R"({"model_type": "ministral3", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "sliding_window": 96, "tie_word_embeddings": false,
      "rope_parameters": {"type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
      "original_max_position_embeddings": 64, "mscale_all_dim": 1.0, "mscale": 1.0,
      "llama_4_scaling_beta": 0.3}})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("tekken", vocab);
  }

 protected:
  bool interleaved_in_gguf() const override { return true; }

  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    if (reader.is_gguf()) {
      read_gguf_windows(reader, config, [](int32_t) { return true; });
    } else {
      config.layer_windows.assign(config.layers, hf_window(reader));
    }
    read_query_growth(reader, config);
  }

  void write_own(GgufKeys& keys) const override {
    write_windows(keys, [](int32_t) { return true; });
    write_query_growth(keys);
  }
};

const Mistral3 kMistral3Object{};

}  // namespace

const Architecture& kMistral3 = kMistral3Object;

}  // namespace millrace
