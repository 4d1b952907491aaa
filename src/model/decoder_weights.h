// The weights that decoders share, under the names most of them have: an architecture's layer_weights() is
// made of these and of what is its own. Each call appends to `to`, in the order of the parameters' comments.
#pragma once

#include <vector>

#include "model/config.h"
#include "model/weight_spec.h"

namespace millrace {

constexpr double kBiasSpread = 0.02;  // of synthetic biases

// One weight: [size]; [rows, cols], which every token of a prompt is multiplied by; a bias of any shape.
WeightSpec norm_weight(std::string_view role, std::string_view hf, int64_t size, WeightMember to);
WeightSpec matrix_weight(std::string_view role, std::string_view hf, int64_t rows, int64_t cols,
                         WeightMember to);
WeightSpec bias_weight(std::string_view role, std::string_view hf, std::vector<int64_t> shape,
                       WeightMember to, Presence presence);

struct AttentionWeights {
  Presence qkv_biases = Presence::kRare, output_bias = Presence::kRare;
  bool qk_norm = false;              // a norm of each head of q and k
  bool interleaved_in_gguf = false;  // WeightSpec's, of q and k
};
// The norm before attention; q, k, v and output; their biases; the norms of q and k.
void add_attention(std::vector<WeightSpec>& to, const ModelConfig& config, const AttentionWeights& weights);

// The norm behind attention, before the feed-forward layer or the experts.
WeightSpec ffn_norm_weight(const ModelConfig& config);
// Hugging Face's names of gate, up and down.
struct FeedForwardNames {
  std::string_view gate = "mlp.gate_proj.weight", up = "mlp.up_proj.weight", down = "mlp.down_proj.weight";
};
// Gate, up and down; their biases.
void add_feed_forward(std::vector<WeightSpec>& to, const ModelConfig& config,
                      const FeedForwardNames& names = {});

struct ExpertWeights {
  std::string_view router_weight, router_bias;  // Hugging Face's names: "mlp.gate.weight"
  HfExperts gate, up, down;
  Presence biases = Presence::kRare;  // of router and experts
  std::string_view router_also = {};  // what else Hugging Face calls the router's weight
};
// Hugging Face's mlp.experts.E.gate_proj and so on, or transformers 5's mlp.experts.gate_up_proj.
ExpertWeights usual_experts(const ModelConfig& config);
// The router; its bias; gate, up and down of the experts; their biases.
void add_experts(std::vector<WeightSpec>& to, const ModelConfig& config, const ExpertWeights& weights);
// Gate, up and down of the shared expert.
void add_shared_expert(std::vector<WeightSpec>& to, const ModelConfig& config, const FeedForwardNames& names);
// Qwen's, whose part a sigmoid of its own decides.
void add_mixed_shared_expert(std::vector<WeightSpec>& to, const ModelConfig& config);
// What is added to a score where experts are chosen.
WeightSpec choice_bias_weight(const ModelConfig& config);

}  // namespace millrace
