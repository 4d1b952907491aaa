// Qwen 3, mixture of experts: Qwen 3's attention; each token goes to the k experts of largest router
// probability.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Qwen3Moe final : public Model {
  void layer(Executor& x, const LayerWeights& w, int index) const override {
    x.norm_qkv(qkv_of(w, config_));
    x.rope_append_kv(rope_of(config_, index));
    x.attend(attend_of(w, config_, index));
    x.project_add({w.attn_output.get(), w.attn_output_bias.get()});
    x.route(route_of(w, config_));
    x.experts_add(experts_of(w, config_));
  }
};

// config.json can make some layers dense; no published model does.
void refuse_dense_layers(const ConfigReader& reader) {
  if (reader.is_gguf()) return;
  const auto dense = reader.hf().find("mlp_only_layers");
  if ((dense != reader.hf().end() && dense->is_array() && !dense->empty()) ||
      reader.hf_real_or(reader.hf(), "decoder_sparse_step", 1) != 1) {
    throw_error(ErrorCode::kUnsupported,
                "{}: config.json: mlp_only_layers, decoder_sparse_step: found dense layers, expected experts "
                "in every layer",
                reader.checkpoint().path());
  }
}

void configure(const ConfigReader& reader, ModelConfig& config) {
  read_common(reader, config);
  refuse_dense_layers(reader);
  config.qk_norm = true;
  config.experts = reader.integer("expert_count", "num_experts", 1, 4096);
  config.experts_per_token = reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
  config.expert_ffn = reader.integer("expert_feed_forward_length", "moe_intermediate_size", 1, 1 << 20);
  bool renormalize = true;
  if (reader.is_gguf()) {
    renormalize = reader.checkpoint().gguf->get_bool("qwen3moe.expert_weights_norm", true);
  } else {
    renormalize = reader.hf().value("norm_topk_prob", false);
  }
  config.expert_weighting =
      renormalize ? Route::Weighting::kSoftmaxAllRenormalized : Route::Weighting::kSoftmaxAll;
  read_hf_layer_types(reader, config);
  read_rope(reader, config);
}

constexpr std::string_view kModelTypes[] = {"qwen3_moe"};

}  // namespace

const Architecture kQwen3Moe = {"qwen3moe", kModelTypes, configure,
                                [] { return std::unique_ptr<Model>(new Qwen3Moe); }};

}  // namespace millrace
