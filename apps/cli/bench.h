// millrace bench: speed, bandwidth and memory.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_bench(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
