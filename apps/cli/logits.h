// millrace logits: a model's logits for given tokens.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_logits(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
