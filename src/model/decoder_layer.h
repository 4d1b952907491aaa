// The pieces from which decoder layers are written: a backend's operations on the usual weights.
#pragma once

#include "backend/backend.h"
#include "model/config.h"
#include "model/weight_spec.h"

namespace millrace {

// A norm of the model's kind; absent where the weight is.
Norm norm_of(const ModelConfig& config, const WeightPtr& weight, const WeightPtr& bias);
NormQkv qkv_of(const LayerWeights& w, const ModelConfig& config);
Rope rope_of(const ModelConfig& config, int layer);
Attend attend_of(const LayerWeights& w, const ModelConfig& config, int layer);
Projection project_of(const LayerWeights& w, const ModelConfig& config);
Ffn ffn_of(const LayerWeights& w, const ModelConfig& config);
Route route_of(const LayerWeights& w, const ModelConfig& config);
Experts experts_of(const LayerWeights& w, const ModelConfig& config);

// What stands behind attention: routed experts, or in a dense layer (ModelConfig::dense_layers) a gated
// feed-forward layer.
void feed_forward_or_experts(Executor& x, const LayerWeights& w, const ModelConfig& config, int layer);

}  // namespace millrace
