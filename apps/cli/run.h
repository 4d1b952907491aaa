// millrace run: one prompt, one answer.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_run(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
