// millrace quantize: a GGUF file of another type.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_quantize(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
