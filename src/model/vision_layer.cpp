#include "model/vision_layer.h"

#include <cmath>
#include <string>

namespace millrace {

ExecutorSpec vision_spec(const VisionLayerShape& shape, int32_t patches) {
  ExecutorSpec spec;
  spec.max_tokens = patches;
  spec.max_logit_rows = 1;
  spec.max_context = (patches + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  spec.hidden = shape.hidden;
  spec.heads = spec.kv_heads = shape.heads;
  spec.head_dim = shape.hidden / shape.heads;
  spec.vocab = 1;
  spec.ffn = shape.ffn;
  spec.kv_type = DType::kF32;
  spec.kv_groups = {{.window = 0, .num_layers = 1, .num_blocks = spec.max_context / kBlockTokens}};
  spec.layers.assign(static_cast<size_t>(shape.layers), {0, 0});
  return spec;
}

void run_vision_layer(Executor& executor, const VisionLayer& w, int index, const VisionLayerShape& shape,
                      std::span<const float> inv_freq, std::span<const uint8_t> axes) {
  const auto norm = [&](const WeightPtr& weight, const WeightPtr& bias) {
    return Norm{weight.get(), shape.eps, bias.get(), Norm::Kind::kLayer};
  };
  const auto linear = [](const WeightPtr& weight, const WeightPtr& bias) {
    return Linear{weight.get(), bias.get()};
  };
  NormQkv qkv;
  qkv.norm = norm(w.norm1, w.norm1_bias);
  qkv.q = linear(w.q, w.q_bias);
  qkv.k = linear(w.k, w.k_bias);
  qkv.v = linear(w.v, w.v_bias);
  executor.norm_qkv(qkv);
  Rope rope;
  rope.layer = index;
  rope.inv_freq = inv_freq;
  rope.axes = axes;
  executor.rope_append_kv(rope);
  Attend attend;
  attend.layer = index;
  attend.scale = 1.0f / std::sqrt(static_cast<float>(shape.hidden / shape.heads));
  attend.bidirectional = true;
  executor.attend(attend);
  Projection projection;
  projection.linear = linear(w.out, w.out_bias);
  executor.project_add(projection);
  Ffn ffn;
  ffn.norm = norm(w.norm2, w.norm2_bias);
  ffn.up = linear(w.up, w.up_bias);
  ffn.down = linear(w.down, w.down_bias);
  ffn.activation = shape.activation;
  executor.ffn_add(ffn);
}

void read_gguf_colours(const io::Gguf& file, std::array<float, 3>& mean, std::array<float, 3>& deviation) {
  const auto colours = [&](const char* key, std::array<float, 3>& to) {
    const io::GgufArray* array = file.get_array(key);
    if (array == nullptr || array->reals.size() != to.size()) return;
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<float>(array->reals[i]);
  };
  colours("clip.vision.image_mean", mean);
  colours("clip.vision.image_std", deviation);
}

}  // namespace millrace
