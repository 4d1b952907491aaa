// The plan (dist/share_plan.h) of a checkpoint over ranks, from its header alone.
#pragma once

#include "dist/share_plan.h"
#include "io/checkpoint.h"
#include "model/model.h"

namespace millrace {

// Throws Error{kUnsupported} for a model that ranks cannot share.
dist::Plan plan_ranks(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds, bool whole_experts = false);

// What of one context is a rank's, where it is spread over ranks.
struct ContextPlan {
  int32_t ranks = 1;
  size_t kv_bytes = 0;  // of rank 0, which has the most
  uint64_t received_per_token =
      0;  // by the rank that receives most, for a token decoded at the context's end
};
ContextPlan plan_context(const ModelConfig& config, int32_t context, DType kv_type, int32_t ranks);

// Can ranks share its rows? Else they can have whole layers each.
bool can_share_rows(const io::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace millrace
