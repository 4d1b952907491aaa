// The angles of rotary position embedding, with the scalings that stretch a model's context.
#pragma once

#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"

namespace millrace {

// Fills config.rope_* from the checkpoint: theta, dims, scaling, the final inv_freq and magnitude.
// truncate_yarn_range: whether YaRN's correction range is rounded to whole dimensions when the file does not
// say.
void read_rope(const ConfigReader& reader, ModelConfig& config, bool truncate_yarn_range = true);

// A config.json's base and scaling as GGUF keys. Llama 3's scaling has none: it travels as a tensor of
// divisors.
void write_rope(GgufKeys& keys);

}  // namespace millrace
