// millrace list: the models in the cache, or those that have short names.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_list(CommandLine& line);

}  // namespace millrace::cli
