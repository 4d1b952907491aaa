// Options of the engine and of the server by the names that they have on the command line, where they are
// described once (apps/cli): ctx=4096 is --ctx=4096.
#pragma once

#include <string>
#include <vector>

#include "millrace/options.h"
#include "server/options.h"

namespace millrace::python {

struct OptionHelp {
  std::string name;  // with dashes
  std::string kind;  // text, integer, real, flag
  bool list = false;
  std::string help;
};
std::vector<OptionHelp> engine_option_help();
std::vector<OptionHelp> server_option_help();

// `words`: --ctx=4096, --lock. Throw cli::UsageError and Error as the command line does.
EngineOptions parse_engine_options(const std::string& model, const std::vector<std::string>& words);
server::ServerOptions parse_server_options(const std::vector<std::string>& words);

}  // namespace millrace::python
