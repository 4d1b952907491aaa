// Ranks that share one model: how a process comes to its group, what all ranks must agree on before a weight
// is loaded, and what a rank other than 0 does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "dist/shares.h"
#include "engine/adapter_set.h"
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
// The ranks of all that this one talks to, besides all of them together: those of its stage, which share the
// stage's rows or a context, and, of the first rank of a stage, those of the other stages.
class RankGroups {
 public:
  // Collective. Throws Error{kBadInput}, with the ranks by name, where they have other numbers of both. `all`
  // must outlive it.
  RankGroups(dist::Communicator& all, const dist::Shares& shares);

  dist::Communicator& all() const { return all_; }
  dist::Communicator* of_stage() const { return of_stage_; }        // none: the rank has its layers by itself
  dist::Communicator* of_pipeline() const { return of_pipeline_; }  // none: another rank of its stage has

 private:
  dist::Communicator& all_;
  std::unique_ptr<dist::Communicator> own_stage_, own_pipeline_;
  dist::Communicator *of_stage_ = nullptr, *of_pipeline_ = nullptr;
};

std::string host_name();  // of this machine
// Which of the ranks on its host a rank is, and how many those are. Collective.
struct HostPlace {
  int local_rank = 0, local_ranks = 1;
};
HostPlace place_on_host(dist::Communicator& group);

// This rank's part of a model. Of one whose attention ranks cannot share, and with whole experts: all heads.
dist::Shares shares_of(const EngineOptions& options, int rank, const io::Checkpoint& checkpoint,
                       const ModelConfig& config);

// The processes that mpirun started, of which there must be as many as the options say. The same group for
// all who ask at the same time. They watch one another: when one hangs, the job ends (dist/job_watch.h).
std::shared_ptr<dist::Communicator> job_group(const EngineOptions& options);

// Throws Error for a model that cannot be cut as the options say.
void check_stages(const ModelConfig& config, const EngineOptions& options);

// Throws Error{kUnsupported} under `name` for a model without experts whose experts are to be shared.
void check_experts(std::string_view name, const ModelConfig& config, const EngineOptions& options);

// EngineOptions::rank_speeds as numbers, one per rank; of "auto", which is measured later, all alike. Throws
// Error{kBadInput} under `name`.
std::vector<double> parse_rank_speeds(std::string_view name, const EngineOptions& options);

// The same options, with speeds that were measured where they say "auto": how fast each rank reads memory,
// and less for one that has too little of it for its part of the model. Rank 0 prints them. Collective.
EngineOptions with_measured_speeds(const EngineOptions& options, dist::Communicator& group,
                                   const io::Checkpoint& checkpoint);

// What a rank has, of which all ranks have the same: program, model, adapters, options and kind of processor.
std::vector<dist::Claim> rank_claims(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                     const EngineOptions& options, const AdapterSet& adapters,
                                     const Backend& backend);
// The same claims of ranks that are started with other options.
std::vector<dist::Claim> with_options(std::vector<dist::Claim> claims, const EngineOptions& options);
// Throws Error{kBadInput}, with the ranks by name, unless all have the same.
void check_ranks_agree(dist::Communicator& group, const io::Checkpoint& checkpoint, const ModelConfig& config,
                       const EngineOptions& options, const AdapterSet& adapters, const Backend& backend);

// This rank's part of a model and of its adapters, for a rank that follows rank 0.
std::unique_ptr<Model> load_part(const io::Checkpoint& checkpoint, AdapterSet adapters, Backend& backend,
                                 const LoadProgress& progress = {});

// Loads this rank's part and follows rank 0 until it closes the model.
void follow_rank_zero(const EngineOptions& options, dist::Communicator& group);

}  // namespace millrace
