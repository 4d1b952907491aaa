#include "fetch_estimate.h"

#include <fmt/core.h>

#include <string_view>

#include "base/error.h"
#include "bench_machine.h"
#include "engine/open_backend.h"
#include "engine/weight_types.h"
#include "hub/model_name.h"
#include "hub/remote_head.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "output.h"

namespace millrace::cli {
namespace {

// Every weight once; of experts those that a token chooses, of the embedding a row, unless it is the output
// matrix too.
double bytes_of_token(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  const bool own_output = checkpoint.find_tensor("output.weight") != nullptr ||
                          checkpoint.find_tensor("lm_head.weight") != nullptr;
  double bytes = 0.0;
  for (const TensorView& tensor : checkpoint.tensors()) {
    const std::string_view name = tensor.name;
    const bool embedding = name.find("token_embd.") != name.npos || name.find("embed_tokens.") != name.npos;
    if (embedding && own_output) continue;
    const bool expert = name.find("_exps.") != name.npos || name.find(".experts.") != name.npos;
    const double part = expert && config.experts > 0 ? static_cast<double>(config.experts_per_token) /
                                                           static_cast<double>(config.experts)
                                                     : 1.0;
    bytes += part * static_cast<double>(tensor.bytes());
  }
  return bytes;
}

FetchEstimate estimate_head(const std::string& path, const EngineOptions& given) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  const ModelConfig config = read_config(checkpoint);
  EngineOptions options = given;
  options.model = path;
  // What "auto" chooses is found out by running the model: here it counts as it is stored.
  if (options.quantize == "auto") options.quantize.clear();
  const RuntimeSetup setup{.weights = weight_types(options)};
  const ChosenBackend chosen = open_backend(checkpoint, config, options, setup);
  FetchEstimate estimate;
  estimate.architecture = config.architecture;
  estimate.device = chosen.backend->description();
  estimate.memory = plan_memory(checkpoint, config, *chosen.backend, options, setup);
  estimate.fits =
      estimate.memory.does_not_fit.empty() && estimate.memory.total <= estimate.memory.memory_available;
  estimate.token_bytes = bytes_of_token(checkpoint, config);
  if (!chosen.backend->own_memory()) estimate.read_gb_s = measure_read_gb_s(*chosen.backend);
  return estimate;
}

}  // namespace

FetchEstimate estimate_fetch(const hub::PullPlan& plan, const hub::Settings& settings,
                             const EngineOptions& options) {
  const hub::RemoteHead head(plan, settings);
  try {
    return estimate_head(head.path(), options);
  } catch (const Error& error) {
    // The path of the head means nothing to anybody: the model's name takes its place.
    std::string message = error.what();
    if (const size_t at = message.find(head.path()); at != std::string::npos) {
      message.replace(at, head.path().size(), plan.name.text());
    }
    throw Error(error.code(), message);
  }
}

std::string describe_fetch(const hub::PullPlan& plan, const hub::Settings& settings) {
  hub::ModelName name = plan.name;
  name.choice = plan.label;
  std::string out = fmt::format("{}{}\n", name.text(),
                                plan.license.empty() ? "" : fmt::format(", license {}", plan.license));
  if (!plan.why.empty()) {
    out += fmt::format("  chosen   {}; for another say hf:{}:NAME\n", plan.why, plan.name.repo);
  }
  out += fmt::format("  fetch    {} of {} in {} file{}, into {}\n", human_bytes(plan.missing_bytes),
                     human_bytes(plan.bytes), plan.files.size(), plan.files.size() == 1 ? "" : "s",
                     settings.cache);
  return out;
}

std::string describe_fetch(const hub::PullPlan& plan, const FetchEstimate& estimate,
                           const hub::Settings& settings) {
  const MemoryPlan& memory = estimate.memory;
  std::string out = describe_fetch(plan, settings);
  out += fmt::format("  memory   {} at a context of {}, of {} available: {}\n", human_bytes(memory.total),
                     human_count(static_cast<size_t>(memory.context)), human_bytes(memory.memory_available),
                     estimate.fits ? "it fits" : "it does not fit");
  if (!memory.does_not_fit.empty()) out += fmt::format("           {}\n", memory.does_not_fit);
  if (const std::optional<double> speed = estimate.tokens_per_s(); speed && estimate.fits) {
    out += fmt::format(
        "  speed    at most {:.{}f} tokens/s: each reads {} of weights, at {:.1f} GB/s (measured)\n", *speed,
        *speed < 10 ? 1 : 0, human_bytes(static_cast<size_t>(estimate.token_bytes)), *estimate.read_gb_s);
  }
  return out;
}

}  // namespace millrace::cli
