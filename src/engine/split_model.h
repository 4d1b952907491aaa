// A model over two devices (backend/mixed): which they are, and what is where. The plan is made from the
// sizes of weights, the workspace and the least that keys and values need, before anything is loaded.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/placement.h"
#include "engine/runtime_setup.h"
#include "io/checkpoint.h"
#include "millrace/options.h"
#include "model/model.h"

namespace millrace {

struct SplitDevices {
  std::string first, second;  // second empty: a model is not split over this one
  bool always = false;        // both were named
};
// "cuda": what does not fit is the cpu's. "cuda+cpu", "cpu+reference": any two.
SplitDevices split_devices(const std::string& device);

// Has the user said what is where?
bool splits_by_options(const EngineOptions& options);

// Throws Error{kNoMemory} where not even a part of the model fits the first device.
mixed::Placement plan_split(const io::Checkpoint& checkpoint, const ModelConfig& config,
                            const EngineOptions& options, const RuntimeSetup& setup, const Backend& first,
                            size_t memory);

std::unique_ptr<Backend> split_model(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                     const EngineOptions& options, const RuntimeSetup& setup,
                                     std::unique_ptr<Backend> first, const std::string& second,
                                     const BackendOptions& wanted);
// The same, or nothing and `first` as it was where it would not run: nothing fits, or ranks share the model.
std::unique_ptr<Backend> try_split_model(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                         const EngineOptions& options, const RuntimeSetup& setup,
                                         std::unique_ptr<Backend>& first, const SplitDevices& devices,
                                         const BackendOptions& wanted);

}  // namespace millrace
