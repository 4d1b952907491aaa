// The plan (dist/share_plan.h) of a checkpoint over ranks, from its header alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "dist/prompt_plan.h"
#include "dist/share_plan.h"
#include "io/checkpoint.h"
#include "model/model.h"

namespace millrace {

// Throws Error{kUnsupported} for a model that ranks cannot share.
dist::Plan plan_ranks(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds, bool whole_experts = false);

// Who has which layers, where each rank has whole ones.
struct StagePlan {
  struct Stage {
    dist::Range layers;
    size_t weight_bytes = 0, kv_bytes_per_token = 0;
    uint64_t received_per_token = 0;  // the residual stream; by rank 0 the logits
  };
  std::vector<Stage> stages;

  // As dist::Plan::token_time: stages follow one another, so that one sequence waits for all of them.
  dist::TokenTime token_time(double alone_s, const dist::LinkSpeed& link) const;
};
StagePlan plan_stages(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds);

// Who has which rows of which layers, where ranks share the rows of stages. Rank r of all is rank r % tensor
// of stage r / tensor.
struct GridPlan {
  struct Stage {
    dist::Range layers;
    dist::Plan rows;  // of these layers
  };
  std::vector<Stage> stages;

  int tensor() const { return static_cast<int>(stages.front().rows.ranks.size()); }
  // Bytes that a rank receives in a step of so many rows, `logit_rows` of which want logits: its stage's
  // exchanges, and the residual stream of the stage before. Without the logits themselves, which the last
  // stage's first rank gets from the others of its stage, and rank 0 from it.
  uint64_t received(int rank, int64_t rows, int64_t logit_rows) const;
  uint64_t logits_received(int rank, int64_t logit_rows) const;
  // As dist::Plan::token_time, one stage after the other.
  dist::TokenTime token_time(double alone_s, const dist::LinkSpeed& link) const;
};
GridPlan plan_grid(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type, int tensor,
                   const std::vector<double>& speeds, bool whole_experts = false);

// What of one context is a rank's, where it is spread over ranks.
struct ContextPlan {
  int32_t ranks = 1;
  size_t kv_bytes = 0;  // of rank 0, which has the most
  uint64_t received_per_token =
      0;  // by the rank that receives most, for a token decoded at the context's end
  // A prompt that fills the context, in steps of so many tokens.
  int32_t step_tokens = 0;
  std::string schedule;              // of its last whole step
  uint64_t received_per_prompt = 0;  // by the rank that receives most
};
struct ContextQuestion {
  int32_t context = 0;
  DType kv_type = DType::kBF16;
  int32_t ranks = 1;
  dist::ScheduleKind schedule = dist::ScheduleKind::kAuto;
  int32_t step_tokens = 512;
};
ContextPlan plan_context(const ModelConfig& config, const ContextQuestion& question);

// A step of `rows` tokens of one sequence behind `context` others, of which the last wants logits or none
// does: what each rank receives, but for the logits themselves.
struct PromptStepPlan {
  std::string schedule;            // of layers that all rows attend in; empty: every rank computes all rows
  std::vector<uint64_t> received;  // [ranks]
};
PromptStepPlan plan_prompt_step(const ExecutorSpec& spec, int32_t ranks, dist::ScheduleKind schedule,
                                int64_t context, int64_t rows, bool wants_logits);

// Can ranks share its rows? Else they can have whole layers each.
bool can_share_rows(const io::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace millrace
