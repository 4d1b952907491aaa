#include "rm.h"

#include <fmt/core.h>

#include <memory>

#include "base/error.h"
#include "confirm.h"
#include "hub/cached_models.h"
#include "hub/model_name.h"
#include "hub/settings.h"
#include "model_names.h"
#include "output.h"

namespace millrace::cli {
namespace {

constexpr const char* kRmFooter =
    "Examples:\n"
    "  millrace rm hf:Qwen/Qwen3-4B-GGUF:Q4_K_M    # as millrace list names it\n"
    "  millrace rm gpt-oss-20b --yes               # without a question\n"
    "  millrace rm hf:Qwen/Qwen3-4B-GGUF           # all of the repository, and what was only begun\n"
    "Content that another model of the same repository needs stays.";

int rm(const std::vector<std::string>& names) {
  const hub::Settings settings = hub::settings_from_environment();
  std::vector<hub::Removal> removals;
  for (const std::string& given : names) {  // all are looked at before the first goes
    const std::optional<hub::ModelName> name = hub_name(given);
    if (!name) {
      throw_error(ErrorCode::kBadInput, "{}: found a path, expected a name as `millrace list` shows it",
                  given);
    }
    removals.push_back(hub::plan_removal(*name, settings));
  }
  for (const hub::Removal& removal : removals) {
    const std::string question = fmt::format("Remove {} ({})?", removal.what, human_bytes(removal.bytes));
    if (!confirmed(question,
                   fmt::format("{}: nothing is removed without a question: say --yes", removal.what))) {
      continue;
    }
    hub::remove(removal);
    write_stderr(fmt::format("removed {}, {} are free\n", removal.what, human_bytes(removal.bytes)));
  }
  return 0;
}

}  // namespace

void add_rm(CommandLine& line) {
  Command command = line.add("rm", "remove a model that was fetched");
  auto names = std::make_shared<std::vector<std::string>>();
  command.option("NAME", *names, "hf:owner/name[@revision][:file or quantization], or a short name")
      .required();
  add_yes_option(command, "do not ask");
  command.footer(kRmFooter);
  command.runs([names] { return rm(*names); });
}

}  // namespace millrace::cli
