// What EngineOptions::quantize means: the type that each weight gets while it is loaded.
#pragma once

#include "engine/runtime_setup.h"
#include "millrace/options.h"

namespace millrace {

// For "auto" the model is measured (auto_types.h), which takes a while: options.on_load is told how far it
// is. Throws Error{kBadInput} for a type or a budget that makes no sense.
WeightTypes weight_types(const EngineOptions& options);

}  // namespace millrace
