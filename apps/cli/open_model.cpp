#include "open_model.h"

#include <fmt/core.h>

#include "base/error.h"
#include "dist/communicator.h"
#include "engine/rank_group.h"
#include "model_names.h"
#include "model_options.h"
#include "output.h"
#include "progress.h"

namespace millrace::cli {
namespace {

// open(options) with the progress bar as its on_load.
template <class Open>
auto open_with_progress(const EngineOptions& given, const Open& open) {
  EngineOptions options = checked(given);
  options.model = find_model(options.model, options);
  if (!options.draft_model.empty()) options.draft_model = find_model(options.draft_model, options);
  std::shared_ptr<dist::Communicator> group;
  if (ranks_of(options) > 1 && options.launcher.empty()) {
    group = job_group(options);
    if (group->rank() != 0) {
      follow_rank_zero(options, *group);
      group.reset();
      throw Followed();
    }
  }
  Progress progress(options.quantize.empty() ? "loading" : "quantizing");
  options.on_load = [&](size_t done, size_t total) { progress.update(done, total); };
  auto opened = open(options);
  progress.clear();
  return opened;
}

}  // namespace

std::unique_ptr<Engine> open_engine(const EngineOptions& options) {
  auto engine = open_with_progress(options, [](const EngineOptions& o) { return Engine::create(o); });
  tell_device(engine->model().device_note);
  tell_quantized(engine->model().quantized);
  return engine;
}

std::unique_ptr<Runtime> open_runtime(const EngineOptions& options, RuntimeSetup setup) {
  setup.adapter = only_adapter(options).empty() ? -1 : 0;
  auto runtime = open_with_progress(options, [&](const EngineOptions& o) { return Runtime::open(o, setup); });
  tell_device(runtime->device_note());
  tell_quantized(runtime->weight_types().note);
  return runtime;
}

void check_writes(const ModelInfo& model) {
  if (!model.encoder) return;
  throw_error(ErrorCode::kUnsupported,
              "{} is a text encoder ({}): it writes no text, `millrace serve` gives its embeddings",
              model.name, model.architecture);
}

void tell_device(const std::string& note) {
  if (!note.empty()) write_stderr(fmt::format("millrace: {}\n", note));
}

void tell_quantized(const std::string& chosen) {
  if (!chosen.empty()) write_stderr(chosen + "\n");
}

}  // namespace millrace::cli
