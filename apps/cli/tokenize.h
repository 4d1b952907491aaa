// millrace tokenize: text to tokens and back.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_tokenize(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
