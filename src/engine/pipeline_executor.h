// A pipeline: every stage has some layers, and the residual stream goes from stage to stage. A stage is a
// rank, or several that share its rows, whose first one speaks for them (LeaderExecutor): ranks here are
// these. Rank 0 is the first stage's and has the engine. What it says goes from rank to rank as well, each
// passing on what it got: a step with the residual stream behind it, so that nobody waits for a stage that is
// busy. The last stage keeps logits until rank 0, which has then sent all of a step, asks for them: no circle
// of ranks waits for itself. A step may come in several micro-batches; while the second stage computes the
// first, the first computes the second.
#pragma once

#include <mutex>
#include <vector>

#include "backend/forwarding_executor.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "engine/rank_group.h"
#include "engine/rank_messages.h"
#include "model/model.h"

namespace millrace {

class PipelineLeader final : public ForwardingExecutor {
 public:
  // `spec` is the whole model's.
  PipelineLeader(const RankGroups& groups, const dist::Shares& shares, const ExecutorSpec& spec,
                 Backend& backend);
  ~PipelineLeader() override;
  PipelineLeader(const PipelineLeader&) = delete;
  PipelineLeader& operator=(const PipelineLeader&) = delete;

  // Micro-batches that follow are one step: logits() has those of all of them, in their order.
  void begin_step();
  // How many a step of so many rows is cut into.
  int64_t micro_batches(int64_t rows) const;
  // Where a step may be cut that was to be cut before `row`: there or behind it.
  int64_t cut(const Batch& batch, int64_t row) const;

  void begin(const Batch& batch) override;
  void start() override;  // the stage's layers are done: the rest is the others'
  std::span<const float> logits() override;
  std::span<const float> logits_of(std::span<const int32_t> rows) override;
  std::span<const int32_t> greedy_tokens() override { return {}; }
  // The logits are the last stage's.
  bool samples() const override { return false; }
  bool works_ahead() const override { return false; }
  bool sample(std::span<const SampleRow> /*rows*/) override { return false; }
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override;
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;

 private:
  void tell(const RankMessage& message, std::span<const std::byte> bytes = {});
  int last() const { return group_.size() - 1; }

  dist::Communicator& group_;
  const dist::Shares shares_;  // between stages
  const ExecutorSpec spec_;
  std::vector<float> logits_;  // [logit rows][vocab] of this step
  size_t logit_rows_ = 0;      // of its micro-batches so far
  bool collected_ = false;
  bool new_step_ = true;  // nothing of it was sent yet
  bool sent_ = true;      // the residual stream of the last micro-batch
  size_t rows_ = 0;       // of the last micro-batch
  std::mutex hidden_mutex_;
  bool has_hidden_ = false;  // the last stage's residual stream is here
  std::vector<std::byte> message_, part_;
};

// A whole step: over the stages of a pipeline in micro-batches, unless hidden states of all rows are asked
// for. `pipeline`: the executor, or what it wraps, where layers are other ranks'; else null.
void forward_in_parts(const Model& model, Executor& executor, PipelineLeader* pipeline, const Batch& batch);

// What the first rank of another stage does until rank 0 closes the model.
void follow_stage(const RankGroups& groups, Backend& backend, Model& model);

// Rows [begin, end) of a batch as a batch of their own, and the memory it points into.
class MicroBatch {
 public:
  MicroBatch(const Batch& whole, int32_t begin, int32_t end);
  Batch view() const;

 private:
  std::span<const int32_t> tokens_;
  std::vector<SequenceSlice> sequences_;
  std::vector<int32_t> logit_rows_;
  std::vector<GivenRow> given_;
  std::span<const int32_t> rope_positions_;
  bool only_logits_;
};

}  // namespace millrace
