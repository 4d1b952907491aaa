// The keys of the GGUF file a checkpoint is quantized into.
#pragma once

#include <optional>

#include "io/checkpoint.h"
#include "io/gguf_writer.h"
#include "model/config.h"

namespace millrace::cli {

// From a GGUF file: its own keys, as they are, but for those that say how it was quantized or split. From a
// Hugging Face directory: the keys llama.cpp's converter writes, tokenizer and chat template included; what
// is read back from them is compared with the directory, and Error{kUnsupported} thrown where GGUF cannot say
// it.
void write_quantized_metadata(const io::Checkpoint& checkpoint, const std::optional<ModelConfig>& config,
                              DType type, io::GgufWriter& writer);

}  // namespace millrace::cli
