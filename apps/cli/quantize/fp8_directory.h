// quantize --type fp8: a Hugging Face directory whose projections are FP8 E4M3 with a scale for each row, as
// compressed-tensors writes it (float-quantized, channel-wise weights, activations as they are).
#pragma once

#include <string>

#include "base/thread_pool.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "quant/recode.h"

namespace millrace::cli {

struct Fp8Report {
  size_t quantized = 0, kept = 0;  // tensors
  size_t file_bytes = 0;           // of the weights
  quant::RecodeError error;        // of those quantized
};

// `out` must not be there; it appears whole or not at all. Throws Error for a source that is no Hugging Face
// directory or has weights that this form does not hold.
Fp8Report write_fp8_directory(const io::Checkpoint& source, const ModelConfig& config, const std::string& out,
                              ThreadPool& pool);

}  // namespace millrace::cli
