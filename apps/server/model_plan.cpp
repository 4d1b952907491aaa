#include "model_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>

#include "engine/available_memory.h"
#include "engine/memory_plan.h"
#include "engine/open_backend.h"
#include "engine/split_model.h"
#include "engine/weight_types.h"

namespace millrace::server {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// Pages of our own; those of mapped files are the system's, which counts them as free.
size_t resident_anonymous() {
  std::ifstream status("/proc/self/status");
  std::string word;
  size_t kib = 0;
  while (status >> word) {
    if (word != "RssAnon:") continue;
    status >> kib;
    break;
  }
  return kib << 10;
}

// What is to be quantized "auto" is measured while it loads, which takes long; as it is stored it takes no
// less.
WeightTypes planned_weights(const EngineOptions& options) {
  return options.quantize == "auto" ? WeightTypes() : weight_types(options);
}

}  // namespace

size_t memory_for_models() { return available_memory() + resident_anonymous(); }

ModelPlan plan_model(const EngineOptions& options, size_t room, bool device_taken) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  const ModelConfig config = read_config(checkpoint);
  const RuntimeSetup setup{.sequences = RuntimeSetup::kShared, .weights = planned_weights(options)};
  const ChosenBackend chosen = open_backend(checkpoint, config, options, setup);
  ModelPlan out{.options = options, .own_memory = chosen.backend->own_memory().has_value()};
  MemoryPlan plan = plan_memory(checkpoint, config, *chosen.backend, options, setup);
  if (out.own_memory) {
    out.does_not_fit = plan.does_not_fit;
    // Split only because other models are there: they may leave.
    const bool crowded = device_taken && !chosen.backend->placement().empty() &&
                         !splits_by_options(options) && !split_devices(options.device).always;
    if (out.does_not_fit.empty() && crowded) out.does_not_fit = chosen.note;
    out.short_of_device = !out.does_not_fit.empty();
    return out;
  }
  if (options.device == "auto" && device_taken) {
    out.short_of_device = true;
    out.does_not_fit = chosen.note;
    return out;
  }
  const size_t fixed =
      plan.weights_mapped + plan.weights_repacked + plan.weights_dequantized + plan.workspace;
  if (options.kv_tokens == 0 && options.kv_bytes == 0) {
    // Pools promise pages that nobody has touched: what the system calls free is not ours alone.
    out.options.kv_bytes = std::max<size_t>(1, room > fixed ? (room - fixed) / 2 : 0);
    plan = plan_memory(checkpoint, config, *chosen.backend, out.options, setup);
  }
  out.main_memory = plan.total;
  if (!plan.does_not_fit.empty() || plan.total > room) {
    out.does_not_fit = fmt::format("it takes {:.2f} GiB of memory, and {:.2f} GiB are left for it",
                                   static_cast<double>(plan.total) / kGiB, static_cast<double>(room) / kGiB);
  }
  return out;
}

}  // namespace millrace::server
