// millrace tune: which kernels are fastest on this machine.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_tune(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
