// The tokenizer and chat template of a checkpoint, without loading weights: from its metadata to plain data,
// since the tokenizer folder knows nothing of files.
#pragma once

#include <memory>
#include <string>

#include "io/checkpoint.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

std::shared_ptr<const Tokenizer> load_tokenizer(const io::Checkpoint& checkpoint);
std::string chat_template_text(const io::Checkpoint& checkpoint);  // empty when there is none

}  // namespace millrace
