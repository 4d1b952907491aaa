// Whether a model fits beside others that are loaded, known before it is loaded: the engine's memory plan
// against what the others leave.
#pragma once

#include <cstddef>
#include <string>

#include "millrace/options.h"

namespace millrace::server {

struct ModelPlan {
  EngineOptions options = {};     // to load it with: the KV cache takes no more than is left for it
  size_t main_memory = 0;         // that it will take, the mapping of its file included
  bool own_memory = false;        // it goes to a device that has memory of its own
  bool short_of_device = false;   // what is missing is the memory of such a device
  std::string does_not_fit = {};  // why not; empty: it fits
};

// `room`: main memory that is left for it. `device_taken`: models that could be unloaded lie in a device's
// own memory, so that a model whose device is "auto" should have it rather than go elsewhere. Throws Error
// for a file that is no model.
ModelPlan plan_model(const EngineOptions& options, size_t room, bool device_taken);

// Main memory that this process may have for models: what is free and what it has taken already.
size_t memory_for_models();

}  // namespace millrace::server
