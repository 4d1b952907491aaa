#include "model_errors.h"

#include <fmt/core.h>

namespace millrace::server {
namespace {

constexpr int kRetryBusyS = 5;  // until somebody may have finished

}  // namespace

std::string public_reason(std::string text, const ModelSpec& spec) {
  for (const std::string* path : {&spec.engine.model, &spec.engine.draft_model, &spec.engine.kv_dir}) {
    if (path->empty()) continue;
    for (size_t at = 0; (at = text.find(*path, at)) != std::string::npos; at += spec.name.size()) {
      text.replace(at, path->size(), spec.name);
    }
  }
  return without_paths(text);
}

ApiError load_error(const ModelSpec& spec, ErrorCode code, const std::string& reason) {
  const bool memory = code == ErrorCode::kNoMemory;
  return {memory ? 503 : 500,
          fmt::format("the model '{}' cannot be loaded: {}", spec.name, public_reason(reason, spec)), "model",
          memory ? "out_of_memory" : "model_load_failed"};
}

ApiError busy_error(const ModelSpec& spec, const std::string& why) {
  ApiError error(503,
                 fmt::format("the model '{}' cannot be loaded now: {}, and the models that are loaded are in "
                             "use",
                             spec.name, why),
                 "model", "models_busy");
  error.retry_after_s = kRetryBusyS;
  return error;
}

ApiError stopping_error() {
  ApiError error(503, "the server is shutting down", "", "shutting_down");
  error.retry_after_s = 1;
  return error;
}

}  // namespace millrace::server
