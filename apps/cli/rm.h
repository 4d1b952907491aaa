// millrace rm: models out of the cache.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_rm(CommandLine& line);

}  // namespace millrace::cli
