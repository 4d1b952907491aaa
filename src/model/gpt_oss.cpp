// gpt-oss: alternating window and full attention with learned sinks, YaRN, biases everywhere, and experts in
// MXFP4 with a clamped SwiGLU. OpenAI 2025.
#include "model/architecture.h"
#include "model/rope.h"

namespace millrace {
namespace {

class GptOss final : public Model {
  void layer(Executor& x, const LayerWeights& w, int index) const override {
    x.norm_qkv(qkv_of(w, config_));
    x.rope_append_kv(rope_of(config_, index));
    x.attend(attend_of(w, config_, index));  // window on even layers; sinks on all
    x.project_add({w.attn_output.get(), w.attn_output_bias.get()});
    x.route(route_of(w, config_));
    x.experts_add(experts_of(w, config_));
  }
};

void configure(const ConfigReader& reader, ModelConfig& config) {
  read_common(reader, config);
  config.experts = reader.integer("expert_count", "num_local_experts", 1, 4096);
  config.experts_per_token = reader.integer("expert_used_count", "num_experts_per_tok", 1, config.experts);
  config.expert_ffn = reader.integer("expert_feed_forward_length", "intermediate_size", 1, 1 << 20);
  config.expert_weighting = Route::Weighting::kSoftmaxChosen;
  config.expert_activation = Experts::Activation::kClampedSwiglu;
  config.swiglu_limit = static_cast<float>(reader.real_or("", "swiglu_limit", 7.0));
  if (!read_hf_layer_types(reader, config)) {
    const int32_t window = reader.integer("attention.sliding_window", "sliding_window", 1, 1 << 28);
    for (int32_t l = 0; l < config.layers; l += 2) config.layer_windows[l] = window;
  }
  read_rope(reader, config, /*truncate_yarn_range=*/false);
}

constexpr std::string_view kModelTypes[] = {"gpt_oss"};

}  // namespace

const Architecture kGptOss = {"gpt-oss", kModelTypes, configure,
                              [] { return std::unique_ptr<Model>(new GptOss); }};

}  // namespace millrace
