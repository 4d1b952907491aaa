// millrace inspect: what a model file holds and what running it takes.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_inspect(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
