// LatentDecoder: a decoder with latent attention, of which one vector a token is cached (DeepSeek-AI 2024): a
// dense start, then routed experts beside shared ones. DeepSeek V2 and V3 and Mistral 4 are such.
#pragma once

#include "model/architecture.h"

namespace millrace {

class LatentDecoder : public Architecture {
 public:
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override;
  void read_config(const ConfigReader& reader, ModelConfig& config) const override;
  void write_keys(GgufKeys& keys) const override;
  std::unique_ptr<LayerWeights> new_layer() const override;
  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override;
  void layer(Executor& x, const LayerWeights& weights, const ModelConfig& config, int index) const override;

 protected:
  // How config.json has experts chosen; GGUF has keys for it.
  struct HfChoice {
    bool softmax = false;         // of the scores; else sigmoids
    bool renormalizes = false;    // softmax: the weights of the chosen ones add up to one
    bool ignores_groups = false;  // softmax: n_group and topk_group mean nothing
  };
  virtual HfChoice hf_choice(const ConfigReader& reader) const = 0;
  // Softmax: groups of experts are chosen by their largest score; else those that leave some out are refused.
  virtual bool softmax_groups_by_largest() const { return false; }
};

}  // namespace millrace
