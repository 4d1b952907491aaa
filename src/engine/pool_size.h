// The executor's limits and how many blocks the main pool has. What the engine allocates and what
// `millrace inspect` says come from here.
#pragma once

#include "backend/backend.h"
#include "engine/runtime_setup.h"
#include "io/checkpoint.h"
#include "millrace/options.h"
#include "model/model.h"

namespace millrace {

// The limits that options mean for a model on a device.
ExecutorLimits runtime_limits(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                              const RuntimeSetup& setup);

// The same with the pools' sizes. Throws Error{kNoMemory} saying what is missing when a device's own memory
// is too small for the model, or the pool for one context.
ExecutorSpec runtime_spec(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                          const EngineOptions& options, const RuntimeSetup& setup);

// Of the machine's memory, or the device's: of a context that is spread over ranks what this one has of it,
// or all where all of them are here.
size_t pool_bytes(const ExecutorSpec& spec, const EngineOptions& options);

// Throws Error{kNoMemory} when contexts of their own do not fit the machine's memory. A pool promises pages
// that it has not got yet: without this, the one that is too many ends the process.
void check_context(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                   const RuntimeSetup& setup);

}  // namespace millrace
