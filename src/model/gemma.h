// Gemma 2 and 3, what they have in common: norms before and behind attention and feed-forward layer, stored
// less one by Hugging Face; GELU by tanh; embeddings times sqrt(hidden); scores scaled by a number of their
// own; windows on some layers.
#pragma once

#include "model/dense_decoder.h"

namespace millrace {

class Gemma : public DenseDecoder {
 public:
  void read_config(const ConfigReader& reader, ModelConfig& config) const override;
  HfNames hf_names() const override { return {.norm_offset = 1.0f}; }
  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override;

 protected:
  void read_own(const ConfigReader& reader, ModelConfig& config) const override;
  void write_own(GgufKeys& keys) const override;

  // Where a file does not say which layers slide: all but every so many-th.
  virtual int32_t full_every() const = 0;
  // GGUF files do not say how scores are scaled: the model of so many layers takes hidden / heads, others
  // head_dim.
  virtual int32_t layers_of_27b() const = 0;
  virtual int32_t gguf_window() const { return 0; }  // of files that name none
  virtual bool qk_norm() const = 0;
  virtual bool attention_softcap() const = 0;  // and of the logits by default
};

}  // namespace millrace
