// LatentDecoder: a decoder with latent attention, of which one vector a token is cached (DeepSeek-AI 2024): a
// dense start, then routed experts beside shared ones. DeepSeek V2 to V3.2 and Mistral 4 are such.
#pragma once

#include "model/architecture.h"
#include "model/decoder_weights.h"

namespace millrace {

struct LatentWeights : LayerWeights {
  WeightPtr q_a, q_a_bias, q_a_norm, kv_a, kv_a_bias, kv_a_norm, k_b, v_b;
  WeightPtr index_q, index_k, index_k_norm, index_k_norm_bias, index_weights;  // of an indexer
};

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
  // Where config.json names the kind of each layer: first_k_dense_replace is how many dense ones there are.
  static void settle_layer_types(nlohmann::json& config);
  // Hugging Face's names of what comes behind attention.
  struct FeedForwardNamesOf {
    ExpertWeights experts;
    std::string_view choice_bias;
    FeedForwardNames shared;
  };
  virtual FeedForwardNamesOf behind_attention(const ModelConfig& config) const;

  // The two halves of a layer's weights, and of a layer.
  static void add_latent_attention(std::vector<WeightSpec>& to, const ModelConfig& config);
  void add_behind_attention(std::vector<WeightSpec>& to, const ModelConfig& config, int layer) const;
  static void attend_latent(Executor& x, const LatentWeights& w, const ModelConfig& config, int index);
};

}  // namespace millrace
