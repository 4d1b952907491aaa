// millrace rank: what `millrace serve` has mpirun start, one process for each rank. Its key comes through the
// environment, where other users of the machine do not see it.
#include "rank.h"

#include <cstdlib>
#include <memory>

#include "base/error.h"
#include "engine/rank_process.h"
#include "model_options.h"

namespace millrace::cli {
namespace {

struct RankOptions {
  EngineOptions engine = default_options();
  std::string front;
};

int run(const RankOptions& options) {
  const char* const key = std::getenv("MILLRACE_RANK_KEY");
  if (key == nullptr) {
    throw_error(ErrorCode::kBadInput,
                "rank: found no MILLRACE_RANK_KEY, expected millrace serve to start it");
  }
  run_rank(checked(options.engine), options.front, key);
  return 0;
}

}  // namespace

void add_rank(CommandLine& line) {
  Command command = line.add("rank", "one process of several that share a model: millrace serve starts it");
  auto options = std::make_shared<RankOptions>();
  command.option("MODEL", options->engine.model, "its file or directory").required();
  command.option("--front", options->front, "HOST:PORT of the process that has the clients").required();
  add_device_options(command, options->engine);
  add_rank_options(command, options->engine);
  command.footer(
      "Nobody needs to call this: millrace serve MODEL --tensor-parallel 3 does, through mpirun "
      "(docs/distribution.md).");
  command.runs([options] { return run(*options); });
}

}  // namespace millrace::cli
