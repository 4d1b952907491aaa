// ModelConfig: what a checkpoint says about its architecture, in one form for GGUF and Hugging Face.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"

namespace millrace {

struct ModelConfig {
  std::string architecture;  // Architecture::name()
  std::string name;          // for people
  int32_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  int32_t ffn = 0;                                             // dense layers
  int32_t experts = 0, experts_per_token = 0, expert_ffn = 0;  // expert layers
  int32_t context_length = 0;                                  // trained
  float norm_eps = 1e-5f;
  Norm::Kind norm_kind = Norm::Kind::kRms;
  Activation ffn_activation = Activation::kSilu;

  // Multipliers and soft caps; none of the first five architectures has them.
  float embedding_scale = 1.0f, residual_scale = 1.0f, logit_scale = 1.0f;
  float attention_scale = 0.0f;                          // of the scores; 0: 1 / sqrt(head_dim)
  float attention_softcap = 0.0f, logit_softcap = 0.0f;  // 0: none

  LatentShape latent;  // of latent attention: head_dim is then rope + rank, kv_heads 1

  std::vector<int32_t> layer_windows;  // [layers]: 0 full attention, else the window
  std::vector<bool> dense_layers;      // of a model with experts, [layers]: those without; empty: none
  bool is_dense(int layer) const { return !dense_layers.empty() && dense_layers[static_cast<size_t>(layer)]; }

  // Layers with a state in place of keys and values, [layers]; empty: none. And the shape of each.
  std::vector<bool> state_layers;
  StateShape state = {};
  bool has_state(int layer) const {
    return !state_layers.empty() && state_layers[static_cast<size_t>(layer)];
  }
  bool state_beside = false;  // every layer has keys and values too (Falcon H1)
  // Layers that keep nothing of a token: a feed-forward layer alone (Nemotron H), [layers]; empty: none.
  std::vector<bool> bare_layers;
  bool keeps(int layer) const { return bare_layers.empty() || !bare_layers[static_cast<size_t>(layer)]; }
  bool gated_attention = false;  // NormQkv::gated
  // Gemma 4. Key/value heads of layers and their size, [layers], where layers differ; kv_heads and head_dim
  // are then the largest. Empty: all are alike.
  struct HeadShape {
    int32_t kv_heads = 0, head_dim = 0;
  };
  std::vector<HeadShape> layer_heads;
  HeadShape heads_of(int layer) const {
    return layer_heads.empty() ? HeadShape{kv_heads, head_dim} : layer_heads[static_cast<size_t>(layer)];
  }
  // Whose keys and values a layer reads, [layers]: its own, or those of one before it. Empty: its own.
  std::vector<int32_t> kv_source;
  bool has_keys(int layer) const {
    return kv_source.empty() || kv_source[static_cast<size_t>(layer)] == layer;
  }
  int32_t layer_input = 0;    // columns of a layer's input (LayerInputs); 0: there are none
  bool expert_norms = false;  // Experts::norm

  // Rotary position: after read_config these are the final angles and magnitude, scaling applied.
  double rope_theta = 10000.0;
  int32_t rotary_dims = 0;
  bool rope_interleaved = false;
  std::vector<float> rope_inv_freq;  // [rotary_dims / 2]
  float rope_magnitude = 1.0f;
  // Qwen 3 VL: of a token's three positions, which one turns a pair, [rotary_dims / 2]. Empty: a token has
  // one.
  std::vector<uint8_t> rope_axes;
  // Gemma 3: the angles of layers with a window, where they are others; empty: all layers have the same.
  std::vector<float> rope_window_inv_freq;
  // LongRoPE: context_length ends where the angles above do; for contexts up to rope_long_context these are
  // the angles, of all positions. Empty: there are no others.
  std::vector<float> rope_long_inv_freq;
  int32_t rope_long_context = 0;
  std::vector<bool> unrotated_layers;  // [layers]: those without rotary positions; empty: none
  bool is_rotated(int layer) const {
    return unrotated_layers.empty() || !unrotated_layers[static_cast<size_t>(layer)];
  }
  bool rope_as_tensor = false;  // GGUF's keys cannot say these angles: a file has a tensor of divisors

  // Mixture of experts
  Route::Weighting expert_weighting = Route::Weighting::kSoftmaxChosen;
  float expert_scale = 1.0f;                            // of the weights
  int32_t expert_groups = 1, expert_groups_chosen = 1;  // Route::groups
  int32_t shared_ffn = 0;                               // of a shared expert; 0: none
  Activation expert_activation = Activation::kSilu;
  float swiglu_alpha = 1.702f, swiglu_limit = 7.0f;

  // A row of weights for each position of the context: there are no longer ones.
  bool learned_positions = false;
  // A text encoder: tokens see those behind them, a text is computed in one step, and what becomes of it is
  // one vector, made of its hidden states.
  bool encoder = false;
  enum class Pooling { kMean, kFirst, kLast } pooling = Pooling::kMean;
  // Of an encoder that is a classifier (classifier_head.h).
  struct Head {
    int32_t labels = 0;  // scores of a text or of a pair; 0: there is no head
    enum class Activation { kTanh, kGelu } activation = Activation::kTanh;
    bool sigmoid = true;      // a score is to be seen as 1 / (1 + e^-score): cross-encoders' one label
    bool pair_types = false;  // tokens of the second text of a pair are of a type of their own
  } head = {};

  // Hyperparameters that one architecture's file alone reads and uses, by its names for them.
  std::map<std::string, float, std::less<>> own;

  // What the model's makers advise: generation_config.json, or general.sampling.* of a GGUF file.
  struct Sampling {
    std::optional<float> temperature, top_p, min_p, repetition_penalty;
    std::optional<int32_t> top_k;
  } sampling;
  std::vector<int32_t> end_tokens;  // from generation_config / config; the tokenizer knows its own
};

// Throws Error{kUnsupported} for an unknown architecture, listing those known, and Error{kBadInput} for
// values that contradict each other.
ModelConfig read_config(const io::Checkpoint& checkpoint);

// The step and cache memory for `config`: at most max_tokens rows a step, contexts up to max_context, room
// for `sequences` of them at full length.
struct ExecutorLimits {
  int32_t max_tokens = 512;
  int32_t max_logit_rows = 1;
  int32_t max_context = 4096;
  int32_t sequences = 1;
  DType kv_type = DType::kF32;
  int32_t adapter_rank = 0;   // ExecutorSpec's
  int32_t context_ranks = 1;  // that contexts are spread over: KvGroupSpec::shelves
  bool page_summaries = false;
  int32_t states_apart = 0;  // KvGroupSpec's; 0: as few as to take no more than keys and values do
};
ExecutorSpec make_executor_spec(const ModelConfig& config, const ExecutorLimits& limits);

}  // namespace millrace
