// The head of an encoder that is a classifier: what was pooled of a text's hidden states becomes a score for
// each label. A cross-encoder has one: how well the second text of a pair answers the first. It is small and
// computed on the host, in double, so that a score has the same bits in any batch.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"
#include "model/weight_spec.h"

namespace millrace {

// Hugging Face's names of a head. The last matrix is called classifier.
struct HeadNames {
  std::string_view dense, dense_bias;
  Presence has_dense_bias = Presence::kRequired;
  std::string_view norm = {}, norm_bias = {};  // of a LayerNorm behind the activation; empty: there is none
};

// Adds a head's weights to those outside the layers where the model has one (ModelConfig::head). llama.cpp
// calls them cls, cls.norm and cls.output.
void add_head(std::vector<WeightSpec>& to, const ModelConfig& config, const HeadNames& names);

class ClassifierHead {
 public:
  // Nothing where the model has no head. Throws Error{kBadInput} for a tensor that is missing.
  static std::optional<ClassifierHead> read(const io::Checkpoint& checkpoint, const ModelConfig& config);

  // output(norm(act(dense(pooled)))), pooled [hidden] -> [labels].
  std::vector<float> scores(std::span<const float> pooled) const;

 private:
  struct Matrix {
    std::vector<float> weight, bias;  // [rows, cols]; [rows] or empty
    std::vector<double> times(std::span<const double> x) const;
  };
  Matrix dense_, output_;
  std::vector<float> norm_, norm_bias_;  // [hidden], or empty
  double norm_eps_ = 0.0;
  ModelConfig::Head::Activation activation_ = ModelConfig::Head::Activation::kTanh;
};

}  // namespace millrace
