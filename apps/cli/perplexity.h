// millrace perplexity: how well a model predicts a text.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_perplexity(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
