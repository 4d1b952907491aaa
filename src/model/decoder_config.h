// The hyperparameters that decoders share, read from either kind of file and written as GGUF keys.
#pragma once

#include <functional>
#include <initializer_list>
#include <string_view>

#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"

namespace millrace {

// The residual stream, layers, query heads and context; fills layer_windows with zeros.
void read_outer_sizes(const ConfigReader& reader, ModelConfig& config);
// These, KV heads and the size of a head.
void read_sizes(const ConfigReader& reader, ModelConfig& config);
// Refuses query heads that are no multiple of the KV heads.
void check_heads(const ConfigReader& reader, const ModelConfig& config);
// RMSNorm's epsilon; `hf`: its key in config.json.
void read_norm_eps(const ConfigReader& reader, ModelConfig& config, std::string_view hf, double usual = 1e-5);
// These and RMSNorm. A config.json must say hidden_act "silu" unless config.ffn_activation is another
// already.
void read_decoder(const ConfigReader& reader, ModelConfig& config);
// Refuses a config.json with another hidden_act.
void expect_silu(const ConfigReader& reader);

// Which layers have a sliding window where the file names none: an architecture's own rule.
using SlidingRule = std::function<bool(int32_t layer)>;
// GGUF's attention.sliding_window_pattern, a flag for each layer or how often one does not slide; or `usual`.
SlidingRule gguf_sliding_rule(const ConfigReader& reader, const ModelConfig& config, SlidingRule usual);
// GGUF: attention.sliding_window in the layers of that rule; usual_window: of files that name none.
void read_gguf_windows(const ConfigReader& reader, ModelConfig& config, const SlidingRule& usual,
                       int32_t usual_window = 0);
// config.json: `window` in the sliding layers of layer_types, or by the rule; 0: no layer slides.
void read_hf_windows(const ConfigReader& reader, ModelConfig& config, int32_t window,
                     const SlidingRule& slides);
int32_t hf_window(const ConfigReader& reader);  // sliding_window; 0 when it is null
// Qwen's of either kind: the layers from max_window_layers on slide, when use_sliding_window says so.
void read_qwen_windows(const ConfigReader& reader, ModelConfig& config);
// config.json's layer_types as state_layers: each is one of `states` or of `attending`; `expected` says so.
// False, and every layer attends, when there is no such list.
bool read_hf_state_layers(const ConfigReader& reader, ModelConfig& config,
                          std::initializer_list<std::string_view> states,
                          std::initializer_list<std::string_view> attending, std::string_view expected);
// `slides`: what read_gguf_windows is called with.
void write_windows(GgufKeys& keys, const SlidingRule& slides);

// How many experts there are, how many a token has, and their size; hf_*: the keys in config.json.
void read_expert_sizes(const ConfigReader& reader, ModelConfig& config, std::string_view hf_count,
                       std::string_view hf_size = "moe_intermediate_size");
// How scores that are sigmoids become weights.
void read_sigmoid_weighting(const ConfigReader& reader, ModelConfig& config);
// What scales the sum of the chosen experts.
void read_expert_scale(const ConfigReader& reader, ModelConfig& config);
// DeepSeek V3's groups of experts.
void read_expert_groups(const ConfigReader& reader, ModelConfig& config);
// Qwen's mixtures, config.json: which layers are dense, those it lists and all but every n-th; and their
// size. A GGUF file shows them by their tensors.
void read_qwen_expert_layers(const ConfigReader& reader, ModelConfig& config);
// GGUF: the layers with a feed-forward layer instead of experts.
void read_gguf_dense_layers(const ConfigReader& reader, ModelConfig& config);
// DeepSeek V3's routing, which GLM 4.5 has too: sigmoids, groups, a scale; and its layers: the first few are
// dense, the others have a shared expert. softmax: scores are a softmax (V2) unless GGUF's key says
// otherwise.
void read_deepseek_experts(const ConfigReader& reader, ModelConfig& config, bool softmax = false);
void write_deepseek_experts(GgufKeys& keys);
// Number and size of experts.
void write_experts(GgufKeys& keys);

// Sizes, heads and context; `feed_forward` becomes feed_forward_length. Not the KV heads of a model with
// states that has a list of them (`kv_heads` false).
void write_sizes(GgufKeys& keys, int64_t feed_forward, bool kv_heads = true);
void write_norm(GgufKeys& keys);

// Granite's multipliers of embeddings, what a block adds, attention scores and logits.
void read_multipliers(const ConfigReader& reader, ModelConfig& config);

}  // namespace millrace
