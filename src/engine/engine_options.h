// The rules of EngineOptions, in one place: what makes sense, and what the options mean for the parts the
// engine is made of. `millrace inspect` plans with the same.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "backend/backend.h"
#include "millrace/options.h"
#include "sched/scheduler.h"

namespace millrace {

// What an option is called in a message: as in the struct, or as on the command line.
enum class OptionNames { kFields, kFlags };

// Throws Error{kBadInput} naming the option that makes no sense. Runtime::open calls it; who has other names
// for the options calls it before.
void check_options(const EngineOptions& options, OptionNames names = OptionNames::kFields);

// f32, f16, bf16, int8 or fp8, the last two by the cache's own names (backend/kv_types.h) for types that
// files store with other scales. Throws Error{kBadInput} naming the option.
DType parse_kv_type(std::string_view option, std::string_view name);

// Drafts of all sequences together in one step.
int32_t draft_rows(const EngineOptions& options);
// What the scheduler may do with an executor that was made for these options.
// `whole_prompts`: Limits' own.
sched::Limits limits_of(const EngineOptions& options, const ExecutorSpec& spec, bool whole_prompts = false);
// Those of the model that drafts come from: it runs where the target runs and keeps nothing.
EngineOptions draft_model_options(const EngineOptions& options, int32_t context);

}  // namespace millrace
