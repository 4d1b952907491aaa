// Llama (2 and 3), Mistral, SmolLM2, TinyLlama: pre-norm, rotary positions, grouped-query attention, SwiGLU.
// Touvron et al. 2023; Dubey et al. 2024; Jiang et al. 2023 (sliding window).
#include "model/architecture.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Llama final : public Model {
  void layer(Executor& x, const LayerWeights& w, int index) const override {
    x.norm_qkv(qkv_of(w, config_));
    x.rope_append_kv(rope_of(config_, index));
    x.attend(attend_of(w, config_, index));
    x.project_add({w.attn_output.get(), w.attn_output_bias.get()});
    x.ffn_add(ffn_of(w, config_));
  }
};

void configure(const ConfigReader& reader, ModelConfig& config) {
  read_common(reader, config);
  config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
  // GGUF's converter reorders q and k so that rotated pairs are neighbours; Hugging Face keeps halves.
  config.rope_interleaved = reader.is_gguf();
  if (!read_hf_layer_types(reader, config)) {
    const int32_t window = reader.integer_or("attention.sliding_window", "sliding_window", 0, 1 << 28, 0);
    config.layer_windows.assign(config.layers, window);
  }
  read_rope(reader, config);
}

constexpr std::string_view kModelTypes[] = {"llama", "mistral"};

}  // namespace

const Architecture kLlama = {"llama", kModelTypes, configure,
                             [] { return std::unique_ptr<Model>(new Llama); }};

}  // namespace millrace
