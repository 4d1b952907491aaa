// millrace inspect --ranks: who of several processes would hold what of a model, what they would say to one
// another, and how fast that is expected to be.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "command.h"
#include "engine/memory_plan.h"
#include "engine/rank_plan.h"
#include "millrace/options.h"

namespace millrace::cli {

struct SharingOptions {
  int32_t ranks = 1, stages = 1;  // stages: of ranks / stages each, which share their rows
  bool context_parallel = false, pipeline_parallel = false;
  std::string context_schedule = "auto";
  std::string rank_speeds;
  bool whole_experts = false;
  // What one rank decodes by itself, tokens per second, and its link: what all of them are expected to.
  double alone = 0, link_us = 0, link_mbit = 0;
};
void add_sharing_options(Command& command, SharingOptions& options);

// One of the four plans, or none for one rank.
struct SharedPlan {
  std::optional<dist::Plan> rows;
  std::optional<StagePlan> stages;
  std::optional<GridPlan> grid;
  std::optional<ContextPlan> context;
  // Of rows, stages and both, rank by rank: weights, workspace, and keys and values of one context.
  std::vector<size_t> memory;
  std::optional<dist::TokenTime> time;
};
// plan, backend: of one process.
SharedPlan plan_shared(const SharingOptions& options, const io::Checkpoint& checkpoint,
                       const ModelConfig& config, const EngineOptions& engine, const MemoryPlan& plan,
                       const Backend& backend);

void add_shared(nlohmann::ordered_json& out, const SharedPlan& shared);
std::string shared_text(const SharedPlan& shared, int32_t context, bool weights);

}  // namespace millrace::cli
