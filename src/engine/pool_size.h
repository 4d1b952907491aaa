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

// Of the machine's memory, or the device's: of a context that ranks share what one of them has at most, or
// all where all of them are here. On a GPU heads and layers of others are counted too.
size_t pool_bytes(const ExecutorSpec& spec, const EngineOptions& options, const Backend& backend);
// What part of a group's heads, or layers, is a rank's.
double part_of_pool(const ExecutorSpec& spec, int group, const dist::Shares& shares, int rank);

// Throws Error{kNoMemory} when contexts of their own do not fit the machine's memory. A pool promises pages
// that it has not got yet: without this, the one that is too many ends the process.
void check_context(const ModelConfig& config, const Backend& backend, const EngineOptions& options,
                   const RuntimeSetup& setup);

}  // namespace millrace
