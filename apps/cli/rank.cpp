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
  const bool taken = run_rank(checked(options.engine), options.front, key);
  return taken ? 0 : 2;  // the front says why
}

}  // namespace

void add_rank(CommandLine& line) {
  Command command = line.add("rank", "one process of several that share a model: millrace serve starts it");
  auto options = std::make_shared<RankOptions>();
  command.option("MODEL", options->engine.model, "its file or directory").required();
  command.option("--front", options->front, "HOST:PORT of the process that has the clients").required();
  // All else of the engine is the front's, and comes with its first message.
  command.option("--device", options->engine.device, "cpu or cuda: ranks of a host take its GPUs in turn")
      .show_default();
  command.option("--threads", options->engine.threads, "CPU threads; 0: all that this process may use")
      .range(0, 1024)
      .show_default();
  command.flag("--lock", options->engine.lock, "keep its part of the model in memory");
  add_adapter_option(command, options->engine, /*many=*/true);
  add_rank_options(command, options->engine);
  command.footer(
      "Examples:\n"
      "  millrace serve model.gguf --tensor-parallel 3       # has mpirun start three of these\n"
      "Nobody needs to call this by hand: docs/distribution.md.");
  command.runs([options] { return run(*options); });
}

}  // namespace millrace::cli
