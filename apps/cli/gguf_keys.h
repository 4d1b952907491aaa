// The hyperparameters of a Hugging Face config.json as GGUF keys; for synth and quantize.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "io/gguf_writer.h"

namespace millrace::cli {

// Everything under "<architecture>."; `source` names the config in messages.
void write_config_keys(const nlohmann::json& config, const std::string& source,
                       const std::string& architecture, int64_t vocab, io::GgufWriter& writer);

}  // namespace millrace::cli
