// millrace devices: what this machine can run models on, and the links between ranks.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_devices(CommandLine& line);

}  // namespace millrace::cli
