#include "model/mixture_decoder.h"

#include "model/decoder_layer.h"

namespace millrace {

std::vector<WeightSpec> MixtureDecoder::layer_weights(const ModelConfig& config, int layer) const {
  std::vector<WeightSpec> weights;
  add_attention(weights, config, attention_weights(config));
  weights.push_back(second_norm_weight(config));
  if (config.is_dense(layer)) {
    add_feed_forward(weights, config);
    return weights;
  }
  add_experts(weights, config, usual_experts(config));
  add_beside_experts(weights, config);
  return weights;
}

void MixtureDecoder::layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const {
  x.norm_qkv(qkv_of(w, config));
  x.rope_append_kv(rope_of(config, index));
  x.attend(attend_of(w, config, index));
  x.project_add(project_of(w, config));
  feed_forward_or_experts(x, w, config, index);
}

WeightSpec MixtureDecoder::second_norm_weight(const ModelConfig& config) const {
  return ffn_norm_weight(config);
}

}  // namespace millrace
