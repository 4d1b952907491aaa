// Decoders whose layers are gated delta nets, and every few layers gated attention (Qwen 3 Next, Qwen 3.5):
// what they share. Yang et al. 2024, Qwen Team 2025.
#pragma once

#include "model/architecture.h"

namespace millrace {

// The weights of a layer with a state, under GGUF's names for them. Files have the products of a layer in
// different pieces: what is not there is null.
struct StateLayerWeights : LayerWeights {
  WeightPtr ssm_in;               // everything that goes in
  WeightPtr attn_qkv, attn_gate;  // queries, keys and values; the gate
  WeightPtr ssm_ba;               // beta and step of each head
  WeightPtr ssm_beta, ssm_alpha;  // one matrix each
  WeightPtr ssm_conv1d, ssm_conv1d_bias, ssm_a, ssm_dt_bias, ssm_d, ssm_norm, ssm_out, ssm_out_bias;
};

class GatedDeltaDecoder : public Architecture {
 public:
  void settle_hf(nlohmann::json& config) const override;
  void read_config(const ConfigReader& reader, ModelConfig& config) const override;
  void write_keys(GgufKeys& keys) const override;
  void settle_written(ModelConfig& config) const override { config.state.tiled = tiled_in_gguf(); }
  HfNames hf_names() const override { return {.norm_offset = 1.0f}; }
  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override;
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<StateLayerWeights>(); }
  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override;
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override;

 protected:
  virtual bool has_experts() const { return true; }
  // Queries, keys, values and gate of a key head stand together in one matrix, and so do beta and step.
  virtual bool fused_inputs() const { return false; }
  // GGUF files have the value heads of a key head apart: StateShape::tiled.
  virtual bool tiled_in_gguf() const { return false; }
};

}  // namespace millrace
