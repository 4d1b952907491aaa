// The keys of a synthetic model's GGUF file.
#pragma once

#include "io/gguf_writer.h"
#include "synth/plan.h"

namespace millrace::cli {

// Tokenizer and chat template included.
void write_metadata(const SynthPlan& plan, io::GgufWriter& writer);

}  // namespace millrace::cli
