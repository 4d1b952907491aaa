// What EngineOptions mean for the parts the engine is made of; `millrace inspect` plans with the same.
#pragma once

#include "engine/runtime.h"
#include "millrace/engine.h"
#include "sched/scheduler.h"

namespace millrace {

// f32, f16, bf16, int8 or fp8, the last two by the cache's own names (backend/kv_types.h) for types that
// files store with other scales. Throws Error{kBadInput} naming the option.
DType parse_kv_type(std::string_view option, std::string_view name);
// Throws Error{kBadInput} naming the option that makes no sense.
void check_options(const EngineOptions& options);
RuntimeOptions runtime_options_of(const EngineOptions& options);
sched::Limits limits_of(const EngineOptions& options, const ExecutorSpec& spec);

}  // namespace millrace
