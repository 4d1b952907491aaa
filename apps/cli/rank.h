// millrace rank: a process of a group that `millrace serve` started.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_rank(CommandLine& line);

}  // namespace millrace::cli
