// millrace synth: random-weight models.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_synth(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
