// Qwen 2 and 2.5: a Llama with biases on q, k and v. Yang et al. 2024.
#include "model/architecture.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen2 final : public Model {
  void layer(Executor& x, const LayerWeights& w, int index) const override {
    x.norm_qkv(qkv_of(w, config_));  // with biases
    x.rope_append_kv(rope_of(config_, index));
    x.attend(attend_of(w, config_, index));
    x.project_add({w.attn_output.get(), nullptr});
    x.ffn_add(ffn_of(w, config_));
  }
};

void configure(const ConfigReader& reader, ModelConfig& config) {
  read_common(reader, config);
  config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
  read_hf_layer_types(reader, config);
  read_rope(reader, config);
}

constexpr std::string_view kModelTypes[] = {"qwen2"};

}  // namespace

const Architecture kQwen2 = {"qwen2", kModelTypes, configure,
                             [] { return std::unique_ptr<Model>(new Qwen2); }};

}  // namespace millrace
