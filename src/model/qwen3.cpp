// Qwen 3, dense: no biases; every query and key head is normalized before it is rotated. Yang et al. 2025.
#include "model/architecture.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen3 final : public Model {
  void layer(Executor& x, const LayerWeights& w, int index) const override {
    x.norm_qkv(qkv_of(w, config_));  // with q_norm and k_norm
    x.rope_append_kv(rope_of(config_, index));
    x.attend(attend_of(w, config_, index));
    x.project_add({w.attn_output.get(), w.attn_output_bias.get()});
    x.ffn_add(ffn_of(w, config_));
  }
};

void configure(const ConfigReader& reader, ModelConfig& config) {
  read_common(reader, config);
  config.qk_norm = true;
  config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
  read_hf_layer_types(reader, config);
  read_rope(reader, config);
}

constexpr std::string_view kModelTypes[] = {"qwen3"};

}  // namespace

const Architecture kQwen3 = {"qwen3", kModelTypes, configure,
                             [] { return std::unique_ptr<Model>(new Qwen3); }};

}  // namespace millrace
