// Ranks that share one model: how a process comes to its group, what all ranks must agree on before a weight
// is loaded, and what a rank other than 0 does.
#pragma once

#include <memory>
#include <vector>

#include "dist/communicator.h"
#include "dist/shares.h"
#include "engine/runtime_setup.h"
#include "io/checkpoint.h"
#include "millrace/options.h"
#include "model/model.h"

namespace millrace {

// Those of the options that share a model, in one number.
inline int ranks_of(const EngineOptions& options) {
  return options.tensor_parallel * options.pipeline_parallel * options.context_parallel;
}
// The field of EngineOptions that says how.
inline const char* ranks_option(const EngineOptions& options) {
  if (options.context_parallel > 1) return "context_parallel";
  return options.pipeline_parallel > 1 ? "pipeline_parallel" : "tensor_parallel";
}
// Which of the ranks on its host a rank is, and how many those are. Collective.
struct HostPlace {
  int local_rank = 0, local_ranks = 1;
};
HostPlace place_on_host(dist::Communicator& group);

// This rank's part of a model. Of one whose attention ranks cannot share, and with whole experts: all heads.
dist::Shares shares_of(const EngineOptions& options, int rank, const io::Checkpoint& checkpoint,
                       const ModelConfig& config);

// The processes that mpirun started, of which there must be as many as the options say. The same group for
// all who ask at the same time.
std::shared_ptr<dist::Communicator> job_group(const EngineOptions& options);

// Throws Error for a model that cannot be cut as the options say.
void check_stages(const ModelConfig& config, const EngineOptions& options);

// Throws Error{kUnsupported} under `name` for a model without experts whose experts are to be shared.
void check_experts(std::string_view name, const ModelConfig& config, const EngineOptions& options);

// EngineOptions::rank_speeds as numbers, one per rank. Throws Error{kBadInput} under `name`.
std::vector<double> parse_rank_speeds(std::string_view name, const EngineOptions& options);

// What a rank has, of which all ranks have the same: program, model, options and kind of processor.
std::vector<dist::Claim> rank_claims(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                     const EngineOptions& options, const Backend& backend);
// The same claims of ranks that are started with other options.
std::vector<dist::Claim> with_options(std::vector<dist::Claim> claims, const EngineOptions& options);
// Throws Error{kBadInput}, with the ranks by name, unless all have the same program, model, options and kind
// of processor.
void check_ranks_agree(dist::Communicator& group, const io::Checkpoint& checkpoint, const ModelConfig& config,
                       const EngineOptions& options, const Backend& backend);

// Loads this rank's part and follows rank 0 until it closes the model.
void follow_rank_zero(const EngineOptions& options, dist::Communicator& group);

}  // namespace millrace
