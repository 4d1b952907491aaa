// millrace chat: a conversation at the terminal.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_chat(CommandLine& line);  // with its options, its help and what it does

}  // namespace millrace::cli
