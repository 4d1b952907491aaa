// The plan (dist/share_plan.h) of a checkpoint over ranks, from its header alone.
#pragma once

#include "dist/share_plan.h"
#include "io/checkpoint.h"
#include "model/model.h"

namespace millrace {

// Throws Error{kUnsupported} for a model that ranks cannot share.
dist::Plan plan_ranks(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds, bool whole_experts = false);

// Can ranks share its rows? Else they can have whole layers each.
bool can_share_rows(const io::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace millrace
