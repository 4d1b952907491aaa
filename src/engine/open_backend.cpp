#include "engine/open_backend.h"

#include "base/error.h"
#include "base/thread_choice.h"
#include "engine/pool_size.h"
#include "engine/split_model.h"

namespace millrace {
namespace {

ChosenBackend tuned(std::unique_ptr<Backend> backend, std::string note = {}) {
  const std::string tuning = load_tuning(*backend);
  if (!tuning.empty()) note += (note.empty() ? "" : "; ") + tuning;
  return {std::move(backend), std::move(note)};
}

// The threads of a CPU that nobody named, and why. Ranks on one host share its processors by their own rule.
std::string choose_cpu_threads(BackendOptions& wanted) {
  if (wanted.threads != 0 || wanted.group != nullptr) return {};
  const ThreadChoice choice = choose_threads(wanted.topology.empty() ? machine_topology() : wanted.topology);
  wanted.threads = choice.threads;
  return choice.note;
}

}  // namespace

ChosenBackend open_backend(const io::Checkpoint& checkpoint, const ModelConfig& config,
                           const EngineOptions& options, const RuntimeSetup& setup, const RankShare& ranks) {
  const bool in_bytes = options.gpu_memory > 1;
  BackendOptions wanted{.threads = options.threads,
                        .topology = setup.topology,
                        .memory_fraction = in_bytes ? 1.0 : options.gpu_memory,
                        .memory_bytes = in_bytes ? static_cast<size_t>(options.gpu_memory) : 0,
                        .group = ranks.group,
                        .shares = ranks.shares,
                        .local_rank = ranks.local_rank,
                        .local_ranks = ranks.local_ranks,
                        .fp8_prompts = options.compute == "fp8"};
  // Ranks share a model on CPUs unless a GPU is named.
  const std::string device = options.device == "auto" && ranks.shares != nullptr ? "cpu" : options.device;
  if (device != "auto") {
    const SplitDevices devices = split_devices(device);
    const std::string threads = devices.first == "cpu" ? choose_cpu_threads(wanted) : "";
    std::unique_ptr<Backend> named = make_backend(devices.first, wanted);
    if (!devices.always && !splits_by_options(options)) {
      if (devices.second.empty() || ranks.shares != nullptr) return tuned(std::move(named), threads);
      try {
        runtime_spec(checkpoint, config, *named, options, setup);
        return tuned(std::move(named));
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kNoMemory || wanted.fp8_prompts) throw;  // CPUs have no such products
        std::unique_ptr<Backend> both =
            try_split_model(checkpoint, config, options, setup, named, devices, wanted);
        if (both == nullptr) return tuned(std::move(named));  // who runs it is told the same
        std::string note = fmt::format("larger than the GPU: {}", both->placement());
        return tuned(std::move(both), std::move(note));
      }
    }
    std::unique_ptr<Backend> both =
        split_model(checkpoint, config, options, setup, std::move(named), devices.second, wanted);
    std::string note = both->placement();
    return tuned(std::move(both), std::move(note));
  }
  std::unique_ptr<Backend> gpu;
  try {
    gpu = make_backend("cuda", wanted);
    if (const OpFeatures missing = setup.adapter_features & gpu->lacks(); missing.any()) {
      throw_error(ErrorCode::kUnsupported, "{} run there only yet", missing.names());
    }
    if (options.attention != "full" && gpu->lacks().has(OpFeature::kSparse)) {
      throw_error(ErrorCode::kUnsupported, "sparse attention runs there only yet");
    }
    runtime_spec(checkpoint, config, *gpu, options, setup);
    return tuned(std::move(gpu));
  } catch (const Error& error) {
    const bool built_without = !gpu && error.code() == ErrorCode::kUnsupported;
    if (error.code() == ErrorCode::kBadInput || wanted.fp8_prompts) throw;
    std::string note = built_without ? "" : fmt::format("using the CPU: {}", error.what());
    if (error.code() == ErrorCode::kNoMemory) note += "; --device cuda splits the model";
    if (const std::string threads = choose_cpu_threads(wanted); !threads.empty())
      note += (note.empty() ? "" : "; ") + threads;
    return {make_backend("cpu", wanted), std::move(note)};
  }
}

}  // namespace millrace
