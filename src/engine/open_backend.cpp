// Which device a model goes to: the one that is named, or with "auto" a GPU if it is there and large enough.
#include "base/error.h"
#include "engine/runtime.h"

namespace millrace {
namespace {

BackendOptions backend_options(const RuntimeOptions& options) {
  if (!(options.gpu_memory > 0.0 && options.gpu_memory <= 1.0)) {
    throw_error(ErrorCode::kBadInput, "gpu memory: found {}, expected a part of it: more than 0, at most 1",
                options.gpu_memory);
  }
  return {.threads = options.threads, .memory_fraction = options.gpu_memory};
}

}  // namespace

ChosenBackend open_backend(const io::Checkpoint& checkpoint, const ModelConfig& config,
                           const RuntimeOptions& options) {
  const BackendOptions wanted = backend_options(options);
  if (options.device != "auto") {
    std::unique_ptr<Backend> named = make_backend(options.device, wanted);
    std::string note = load_tuning(*named);
    return {std::move(named), std::move(note)};
  }
  std::unique_ptr<Backend> gpu;
  try {
    gpu = make_backend("cuda", wanted);
    runtime_spec(checkpoint, config, *gpu, options);
    std::string note = load_tuning(*gpu);
    return {std::move(gpu), std::move(note)};
  } catch (const Error& error) {
    const bool built_without = !gpu && error.code() == ErrorCode::kUnsupported;
    if (error.code() == ErrorCode::kBadInput) throw;
    return {make_backend("cpu", wanted), built_without ? "" : fmt::format("using the CPU: {}", error.what())};
  }
}

}  // namespace millrace
