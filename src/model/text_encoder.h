// What text encoders share: how a text's hidden states become one vector, as GGUF keys or the files that
// sentence-transformers writes beside config.json say, and attention to both sides.
#pragma once

#include "backend/backend.h"
#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"
#include "model/weight_spec.h"

namespace millrace {

// Makes `config` an encoder's and reads its pooling: pooling_type, or modules.json and the folder it names;
// else the mean. Throws Error{kUnsupported} for modules and poolings that are not here.
void read_encoder(const ConfigReader& reader, ModelConfig& config);
void write_encoder(GgufKeys& keys);

// attend_of, to both sides.
Attend attend_both_ways(const LayerWeights& w, const ModelConfig& config, int layer);

}  // namespace millrace
