// millrace pull: a model from the hub into the cache.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_pull(CommandLine& line);

}  // namespace millrace::cli
