// The hyperparameters that decoders share, read from either kind of file and written as GGUF keys.
#pragma once

#include <functional>

#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"

namespace millrace {

// Sizes, heads and context; fills layer_windows with zeros.
void read_sizes(const ConfigReader& reader, ModelConfig& config);
// These and RMSNorm. A config.json must say hidden_act "silu" unless config.ffn_activation is another
// already.
void read_decoder(const ConfigReader& reader, ModelConfig& config);
// Refuses a config.json with another hidden_act.
void expect_silu(const ConfigReader& reader);

// Which layers have a sliding window where the file names none: an architecture's own rule.
using SlidingRule = std::function<bool(int32_t layer)>;
// GGUF: attention.sliding_window in the layers of attention.sliding_window_pattern, or by the rule.
void read_gguf_windows(const ConfigReader& reader, ModelConfig& config, const SlidingRule& slides);
// config.json: `window` in the sliding layers of layer_types, or by the rule; 0: no layer slides.
void read_hf_windows(const ConfigReader& reader, ModelConfig& config, int32_t window,
                     const SlidingRule& slides);
int32_t hf_window(const ConfigReader& reader);  // sliding_window; 0 when it is null
// Qwen's of either kind: the layers from max_window_layers on slide, when use_sliding_window says so.
void read_qwen_windows(const ConfigReader& reader, ModelConfig& config);
// `slides`: what read_gguf_windows is called with.
void write_windows(GgufKeys& keys, const SlidingRule& slides);

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

}  // namespace millrace
