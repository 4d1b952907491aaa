// The executor of a mixed device: each operation goes to the one of two executors that has its weights, and
// the residual stream is where it was worked on last. Of a layer whose experts both have, the first routes
// and multiplies its own while the second multiplies its: x += what the first's experts add, then += what the
// second's add, always in this order.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/placement.h"

namespace millrace::mixed {

enum class Side;

// What of a model's executor is one side's: its layers' keys and values; of the second, no logits.
ExecutorSpec spec_of(const ExecutorSpec& whole, const Placement& placement, Side side);

// Throws Error{kUnsupported} for an executor that cannot be half of one (MixedPart).
std::unique_ptr<Executor> make_mixed_executor(const ExecutorSpec& whole, const Placement& placement,
                                              std::unique_ptr<Executor> first,
                                              std::unique_ptr<Executor> second);

}  // namespace millrace::mixed
