// millrace calibrate: an importance matrix from a text.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_calibrate(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
