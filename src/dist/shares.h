// Shares: how dimensions are cut over the ranks of tensor parallelism, by the shape and the ranks' shares
// alone, so that every rank knows everybody's part. Rows of matrices are cut into units of up to 32 (what
// kernels take at once); attention is cut by heads, and where there are more ranks than KV heads several
// ranks hold the same KV head. Experts are cut by rows as every matrix is, or each rank has whole ones. Or
// how layers are cut over the stages of a pipeline, of whole layers each, whose rows ranks may share again.
// Or which rank this is of those that a context is spread over: each has the whole model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dist/prompt_plan.h"

namespace millrace::dist {

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

constexpr int kMaxTensorRanks = 16;

class Shares {
 public:
  // speeds: one per rank, of which shares are made in proportion; all above 0. Throws Error otherwise.
  Shares(int rank, std::vector<double> speeds);
  static Shares even(int rank, int ranks) {
    return {rank, std::vector<double>(static_cast<size_t>(ranks), 1.0)};
  }

  // A stage of a pipeline: all rows and heads, of its layers.
  static Shares pipeline(int stage, std::vector<double> speeds) { return grid(stage, 1, std::move(speeds)); }
  // Stages of so many ranks each, which share their stage's rows: rank r of all is rank r % ranks_of_stage of
  // stage r / ranks_of_stage. speeds: one per rank of all; a stage has those of its ranks together.
  static Shares grid(int rank, int ranks_of_stage, std::vector<double> speeds);
  // What a stage's ranks share of its layers; and what stages have, each as one.
  Shares within_stage() const;
  Shares between_stages() const;
  int stage() const { return stage_; }
  int stages() const { return static_cast<int>(stage_speeds_.size()); }  // 1: no pipeline
  Range layers(int64_t total) const { return layers_of(stage_, total); }
  Range layers_of(int stage, int64_t total) const;

  // A rank of those that a context is spread over: all rows, heads and layers.
  static Shares context(int rank, int ranks, ScheduleKind schedule = ScheduleKind::kAuto);
  int context_rank() const { return context_rank_; }
  int context_ranks() const { return context_ranks_; }  // 1: it is not spread
  ScheduleKind context_schedule() const { return context_schedule_; }

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(speeds_.size()); }
  const std::vector<double>& speeds() const { return speeds_; }

  // [ranks + 1]: rank r has [cut[r], cut[r + 1]) of `total` rows, which may be none where there are too few.
  std::vector<int64_t> cut(int64_t total) const;
  Range rows(int64_t total) const { return rows_of(rank_, total); }
  Range rows_of(int rank, int64_t total) const;

  // The same with whole experts in each rank, in place of some rows of every expert.
  Shares with_whole_experts() const;
  bool whole_experts() const { return whole_experts_; }
  // The same with all heads in each rank, of models whose attention (or what is in its place) cannot be cut.
  Shares with_whole_attention() const;
  bool whole_attention() const { return whole_attention_; }
  // A rank's experts of `total`, which may be none.
  Range experts(int64_t total) const { return experts_of(rank_, total); }
  Range experts_of(int rank, int64_t total) const;

  // A rank's query heads, and the KV heads they read: so many whole groups, or a part of one, or nothing.
  struct Heads {
    Range query, kv;
  };
  Heads heads(int64_t heads, int64_t kv_heads) const { return heads_of(rank_, heads, kv_heads); }
  Heads heads_of(int rank, int64_t heads, int64_t kv_heads) const;

 private:
  int rank_;
  std::vector<double> speeds_;
  bool whole_experts_ = false, whole_attention_ = false;
  int stage_ = 0;
  std::vector<double> stage_speeds_ = {1.0};
  int context_rank_ = 0, context_ranks_ = 1;
  ScheduleKind context_schedule_ = ScheduleKind::kAuto;
};

}  // namespace millrace::dist
