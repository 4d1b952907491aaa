// A Hugging Face tokenizer as GGUF's tokenizer.ggml.* keys.
#pragma once

#include "io/checkpoint.h"
#include "io/gguf_writer.h"
#include "model/config.h"

namespace millrace::cli {

// tokenizer.json, tokenizer_config.json and the chat template. Without a tokenizer.json nothing is written.
// Throws Error{kUnsupported} for a way of splitting words that has no name in GGUF.
void write_vocabulary(const io::Checkpoint& hf, const ModelConfig& config, io::GgufWriter& writer);

// Do both tokenizers give the same ids for texts of many kinds? Throws Error{kUnsupported} with the first
// that they do not agree on.
void check_vocabulary(const io::Checkpoint& hf, const io::Checkpoint& gguf);

}  // namespace millrace::cli
