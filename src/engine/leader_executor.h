// LeaderExecutor: the executor of the first of the ranks that share rows or contexts (of a stage, or of all),
// which tells the others what it is asked to do before it does its own part. KV blocks are whole here: what
// the cache reads and writes is put together from the ranks' KV heads, in the order that one process has, so
// that tiers on disk are the same for any number of ranks.
#pragma once

#include <memory>
#include <vector>

#include "backend/forwarding_executor.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "engine/rank_group.h"
#include "engine/rank_messages.h"
#include "engine/rank_sampler.h"
#include "model/model.h"

namespace millrace {

class LeaderExecutor final : public ForwardingExecutor {
 public:
  // Makes executors on all ranks of `group`. `spec` is that of all of them together.
  LeaderExecutor(dist::Communicator& group, const dist::Shares& shares, const ExecutorSpec& spec,
                 Backend& backend);
  ~LeaderExecutor() override;
  LeaderExecutor(const LeaderExecutor&) = delete;
  LeaderExecutor& operator=(const LeaderExecutor&) = delete;

  void begin(const Batch& batch) override;
  std::span<const float> logits() override;
  std::span<const float> logits_of(std::span<const int32_t> rows) override;
  std::span<const int32_t> greedy_tokens() override;
  // By what ranks know of their parts of the vocabulary (rank_sampler.h).
  bool samples() const override { return true; }
  bool works_ahead() const override { return false; }
  bool sample(std::span<const SampleRow> rows) override;
  std::span<const SampledRow> sampled() override { return sampled_; }
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;
  // Of a stage behind the first, what the stage before has made, to everybody.
  void write_slot(Slot slot, std::span<const float> values) override;

 private:
  void tell(const RankMessage& message, std::span<const std::byte> bytes = {});
  int keeper(int group, int32_t block) const;  // of a context over ranks: who has a block

  dist::Communicator& group_;
  const dist::Shares shares_;  // within the stage
  const bool receives_;        // from the stage before
  const ExecutorSpec spec_;
  Backend& backend_;
  RankSampler sampler_;
  std::span<const SampledRow> sampled_;
  std::span<const float> logits_;  // of this step, once they were collected
  bool collected_ = false;
  std::vector<std::byte> message_, part_;
};

// Rank 0's executor. Makes executors on all ranks. `spec` is the whole model's.
std::unique_ptr<Executor> make_leader(const RankGroups& groups, const dist::Shares& shares,
                                      const ExecutorSpec& spec, Backend& backend);

// That of a stage's first rank; `spec` is the stage's.
std::unique_ptr<Executor> make_stage_executor(const RankGroups& groups, const dist::Shares& shares,
                                              const ExecutorSpec& spec, Backend& backend);

// What another rank does until rank 0 closes the model.
void follow(const RankGroups& groups, Backend& backend, Model& model);

}  // namespace millrace
