// millrace serve: the engine behind OpenAI's API.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_serve(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
