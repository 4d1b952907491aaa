// Models behind a progress bar: what every command that runs one begins with.
#pragma once

#include <memory>
#include <string>

#include "engine/runtime.h"
#include "millrace/engine.h"

namespace millrace::cli {

// Thrown to main by a process that is not rank 0, when rank 0 has closed the model: it did its part.
struct Followed {};

// Both take options as they were parsed, check them (model_options.h) and find the models that they name
// (model_names.h). Throw Error.
std::unique_ptr<Engine> open_engine(const EngineOptions& options);
std::unique_ptr<Runtime> open_runtime(const EngineOptions& options, RuntimeSetup setup = {});

// Throws Error{kUnsupported} for a text encoder.
void check_writes(const ModelInfo& model);

// What there is to say of the device, if anything: "auto" did not find a GPU and why, a tuning file is not
// used.
void tell_device(const std::string& note);
// What --quantize auto chose and what that costs, on standard error.
void tell_quantized(const std::string& chosen);

}  // namespace millrace::cli
