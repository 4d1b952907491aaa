// millrace serve: the engine behind OpenAI's API.
#pragma once

#include "command.h"
#include "server/options.h"

namespace millrace::cli {

void add_serve(CommandLine& line);  // with its options, its help and what it does
// Of the server itself: --host, --port, --keys and the rest.
void add_server_options(Command& command, server::ServerOptions& options);

}  // namespace millrace::cli
