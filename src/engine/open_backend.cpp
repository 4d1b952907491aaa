#include "engine/open_backend.h"

#include "base/error.h"
#include "engine/pool_size.h"

namespace millrace {

ChosenBackend open_backend(const io::Checkpoint& checkpoint, const ModelConfig& config,
                           const EngineOptions& options, const RuntimeSetup& setup, const RankShare& ranks) {
  const BackendOptions wanted{.threads = options.threads,
                              .topology = setup.topology,
                              .memory_fraction = options.gpu_memory,
                              .group = ranks.group,
                              .shares = ranks.shares};
  // Ranks share a model on CPUs only.
  const std::string device = options.device == "auto" && ranks.shares != nullptr ? "cpu" : options.device;
  if (device != "auto") {
    std::unique_ptr<Backend> named = make_backend(device, wanted);
    std::string note = load_tuning(*named);
    return {std::move(named), std::move(note)};
  }
  std::unique_ptr<Backend> gpu;
  try {
    gpu = make_backend("cuda", wanted);
    OpFeatures wants;
    wants.add(OpFeature::kAdapters, setup.adapter_rank > 0);
    if ((wants & gpu->lacks()).any()) throw_error(ErrorCode::kUnsupported, "adapters run there only yet");
    runtime_spec(checkpoint, config, *gpu, options, setup);
    std::string note = load_tuning(*gpu);
    return {std::move(gpu), std::move(note)};
  } catch (const Error& error) {
    const bool built_without = !gpu && error.code() == ErrorCode::kUnsupported;
    if (error.code() == ErrorCode::kBadInput) throw;
    return {make_backend("cpu", wanted), built_without ? "" : fmt::format("using the CPU: {}", error.what())};
  }
}

}  // namespace millrace
