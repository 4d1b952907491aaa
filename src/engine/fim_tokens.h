// The tokens by which a model is asked to fill a gap: what the file says (GGUF's tokenizer.ggml.fim_*), else
// the names that known families have for them.
#pragma once

#include "io/checkpoint.h"
#include "millrace/engine.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

// Nothing found: an Infill that does not fill. Throws Error{kBadInput} for an id that is no token.
ModelInfo::Infill find_fim_tokens(const io::Checkpoint& checkpoint, const Tokenizer& tokenizer);

}  // namespace millrace
