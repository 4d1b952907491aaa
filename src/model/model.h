// Model: an architecture's weights on a backend, and its forward pass in the backend's operations.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/config.h"

namespace millrace {

struct LayerWeights {
  WeightPtr attn_norm, attn_q, attn_k, attn_v, attn_output;
  WeightPtr attn_q_bias, attn_k_bias, attn_v_bias, attn_output_bias;
  WeightPtr attn_q_norm, attn_k_norm, attn_sinks;
  WeightPtr ffn_norm, ffn_gate, ffn_up, ffn_down;  // dense
  WeightPtr ffn_gate_bias, ffn_up_bias, ffn_down_bias;
  WeightPtr router, router_bias;  // experts
  WeightPtr gate_experts, up_experts, down_experts, gate_experts_bias, up_experts_bias, down_experts_bias;
};

struct ModelWeights {
  WeightPtr token_embedding, output_norm, output;  // output is null when tied to token_embedding
  std::vector<LayerWeights> layers;
};

// Called with done and total bytes while weights are taken in.
using LoadProgress = std::function<void(size_t done, size_t total)>;

class Model {
 public:
  // The checkpoint must outlive the model: weights stay in its mapping.
  static std::unique_ptr<Model> load(const io::Checkpoint& checkpoint, Backend& backend,
                                     const LoadProgress& progress = {});
  virtual ~Model() = default;

  const ModelConfig& config() const { return config_; }
  // Bytes one decoded token must read from the weights (experts: only the chosen ones).
  size_t bytes_per_token() const { return bytes_per_token_; }

  // One step: logits of batch.logit_rows are in executor.logits() afterwards.
  void forward(Executor& executor, const Batch& batch) const;

 protected:
  // A decoder layer in this architecture's own words.
  virtual void layer(Executor& executor, const LayerWeights& weights, int index) const = 0;

  ModelConfig config_;
  ModelWeights weights_;
  size_t bytes_per_token_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> gathered_;  // weights that could not stay in the mapping
};

// What loading would cost on this backend, without loading: bytes in the file, bytes held beyond it.
struct WeightBytes {
  size_t mapped = 0, repacked = 0;
};
WeightBytes plan_weights(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend);

}  // namespace millrace
