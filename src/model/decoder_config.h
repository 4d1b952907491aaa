// The hyperparameters that decoders share, read from either kind of file and written as GGUF keys.
#pragma once

#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"

namespace millrace {

// Sizes, heads, context, norm; fills layer_windows with zeros.
void read_decoder(const ConfigReader& reader, ModelConfig& config);
// config.json's layer_types / sliding_window; false when it has no layer_types.
bool read_hf_layer_types(const ConfigReader& reader, ModelConfig& config);

// Sizes, heads and context; `feed_forward` becomes feed_forward_length.
void write_sizes(GgufKeys& keys, int64_t feed_forward);
void write_norm(GgufKeys& keys);

}  // namespace millrace
