// A rank's part of a step: who has which columns of an activation, and the exchange that gives everybody all
// of them. Every rank computes some output rows of every matrix with the whole input, or whole experts, so
// that a row's sum is made by one rank in the order it always has: the bits are those of one process,
// whatever the number of ranks.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/thread_pool.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "kernels/cpu/moe/expert_outputs.h"

namespace millrace::cpu {

class RankPart {
 public:
  RankPart(dist::Communicator& group, const dist::Shares& shares, const ExecutorSpec& whole);

  bool whole_attention() const { return shares_.whole_attention(); }  // every rank has all heads
  bool has_heads() const { return heads_.query.size() > 0; }
  int64_t head_columns() const { return query_bounds_.back(); }  // of all ranks
  // The first of this rank's rows of a matrix of `total`.
  int64_t first_row(int64_t total) const { return shares_.rows(total).begin; }

  // whole[rows][total] of everybody's mine[rows][own columns], rows `stride` apart. `mine` may lie in
  // `whole`.
  void gather_rows(ThreadPool& pool, const float* mine, int64_t stride, float* whole, int64_t total,
                   int64_t rows);
  // The same of columns that are cut by heads.
  void gather_heads(ThreadPool& pool, const float* mine, float* whole, int64_t rows);
  // Rank 0 gets everybody's; `whole` is not looked at on the others.
  void collect_rows(ThreadPool& pool, const float* mine, float* whole, int64_t total, int64_t rows);
  dist::Communicator& group() { return group_; }

  // Experts: whose (row, slot) pairs are whose, where ranks have whole experts. chosen[pairs]: all ranks'
  // numbering, -1: none.
  bool whole_experts() const { return shares_.whole_experts(); }
  void sort_pairs(const int32_t* chosen, int64_t pairs, int64_t experts);
  const int32_t* own_chosen() const {
    return own_chosen_.data();
  }  // [pairs]: this rank's numbering, -1: others'
  bool has_pairs() const { return !own_pairs_.empty(); }
  // y[rows][own columns of hidden], `hidden` apart, += the sum of each row's experts in slot order, whoever
  // made them: a rank sends each of the others the columns that are the other's.
  void add_experts(const Context& ctx, const WeighOutputs& made, int64_t rows, int64_t k, float* y);

  // What this rank computes itself of activations between up and down, [rows][its part].
  float* inner() { return inner_.data(); }

 private:
  void gather(ThreadPool& pool, const float* mine, int64_t stride, float* whole,
              std::span<const int64_t> bounds, int64_t rows);
  void unpack(ThreadPool& pool, float* whole, std::span<const int64_t> bounds, int64_t rows);

  dist::Communicator& group_;
  const dist::Shares& shares_;
  dist::Shares::Heads heads_;
  std::vector<int64_t> query_bounds_;  // [ranks + 1]: columns of the heads' outputs
  std::vector<float> exchanged_;       // [ranks][rows][columns]: as they arrive
  std::vector<float> inner_;
  std::vector<size_t> bytes_, out_bytes_;  // [ranks]
  std::vector<int32_t> own_chosen_, own_pairs_;
  std::vector<int32_t> place_;     // [pairs]: row of what arrives, rank after rank; -1: none
  std::vector<int64_t> pairs_of_;  // [ranks]
};

}  // namespace millrace::cpu
