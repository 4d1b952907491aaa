// MixtureDecoder: a decoder with experts as most families have it (norm, attention, norm, experts that a
// router chooses; layers that the configuration calls dense have a gated feed-forward layer in their place),
// with the places where one family differs from the next.
#pragma once

#include "model/architecture.h"
#include "model/decoder_weights.h"

namespace millrace {

class MixtureDecoder : public Architecture {
 public:
  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override;
  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override;

 protected:
  virtual AttentionWeights attention_weights(const ModelConfig& config) const = 0;
  // The norm behind attention.
  virtual WeightSpec second_norm_weight(const ModelConfig& config) const;
  // What a layer has beside router and experts: a shared expert, a bias of the choice.
  virtual void add_beside_experts(std::vector<WeightSpec>& /*to*/, const ModelConfig& /*config*/) const {}
};

}  // namespace millrace
