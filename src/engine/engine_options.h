// What EngineOptions mean for the parts the engine is made of; `millrace inspect` plans with the same.
#pragma once

#include "engine/runtime.h"
#include "millrace/engine.h"
#include "sched/scheduler.h"

namespace millrace {

// Throws Error{kBadInput} naming the option that makes no sense.
void check_options(const EngineOptions& options);
RuntimeOptions runtime_options_of(const EngineOptions& options);
sched::Limits limits_of(const EngineOptions& options, const ExecutorSpec& spec);

}  // namespace millrace
