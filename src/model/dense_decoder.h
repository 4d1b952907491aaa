// DenseDecoder: a decoder without experts as most families have it (norm, attention, norm, gated
// feed-forward), with the places where one family differs from the next. A family that differs by a few
// switches is a few lines on top of this.
#pragma once

#include "model/architecture.h"

namespace millrace {

class DenseDecoder : public Architecture {
 public:
  void read_config(const ConfigReader& reader, ModelConfig& config) const override;
  void write_keys(GgufKeys& keys) const override;
  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override;
  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override;
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override;

 protected:
  // GGUF's converter reorders q and k so that rotated pairs are neighbours, as in llama's files.
  virtual bool interleaved_in_gguf() const { return false; }
  // What the family has beside sizes and rotary positions, read between the two: windows, multipliers.
  virtual void read_own(const ConfigReader& /*reader*/, ModelConfig& /*config*/) const {}
  virtual void write_own(GgufKeys& /*keys*/) const {}
};

}  // namespace millrace
