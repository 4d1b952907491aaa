#include "option_names.h"

#include "cli/model_options.h"
#include "cli/serve.h"

namespace millrace::python {
namespace {

void add_options(cli::Command& command, EngineOptions& options) {
  cli::add_device_options(command, options);
  cli::add_quantize_option(command, options);
  cli::add_engine_options(command, options, "Engine");
  command.option("--max-queue", options.max_waiting, "requests that may wait; more are refused")
      .range(0, 1 << 24);
}

const char* name_of(cli::Setting::Kind kind) {
  switch (kind) {
    case cli::Setting::Kind::kText:
      return "text";
    case cli::Setting::Kind::kInteger:
      return "integer";
    case cli::Setting::Kind::kReal:
      return "real";
    case cli::Setting::Kind::kAmount:
      return "amount";
    case cli::Setting::Kind::kFlag:
      break;
  }
  return "flag";
}

std::vector<OptionHelp> help_of(const cli::Command& command) {
  std::vector<OptionHelp> all;
  for (const cli::Command::Description& option : command.describe()) {
    all.push_back({option.setting.key, name_of(option.setting.kind), option.setting.list, option.help});
  }
  return all;
}

constexpr const char* kCommand = "python";

void parse(cli::CommandLine& line, const std::vector<std::string>& words) {
  std::vector<std::string> all = {kCommand};
  all.insert(all.end(), words.begin(), words.end());
  line.parse_alone(all);
}

}  // namespace

std::vector<OptionHelp> engine_option_help() {
  cli::CommandLine line("", "", "");
  cli::Command command = line.add(kCommand, "");
  EngineOptions options;
  add_options(command, options);
  return help_of(command);
}

std::vector<OptionHelp> server_option_help() {
  cli::CommandLine line("", "", "");
  cli::Command command = line.add(kCommand, "");
  server::ServerOptions options;
  cli::add_server_options(command, options);
  return help_of(command);
}

EngineOptions parse_engine_options(const std::string& model, const std::vector<std::string>& words) {
  cli::CommandLine line("", "", "");
  cli::Command command = line.add(kCommand, "");
  EngineOptions options = cli::default_options();
  options.model = model;
  add_options(command, options);
  parse(line, words);
  return cli::checked(options);
}

server::ServerOptions parse_server_options(const std::vector<std::string>& words) {
  cli::CommandLine line("", "", "");
  cli::Command command = line.add(kCommand, "");
  server::ServerOptions options;
  cli::add_server_options(command, options);
  parse(line, words);
  return options;
}

}  // namespace millrace::python
