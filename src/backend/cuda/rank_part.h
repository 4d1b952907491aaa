// A rank's part of a step on a GPU, as backend/cpu/rank_part.h has it for CPUs: every rank computes some
// output rows of every matrix with the whole input and some heads, and the ranks' columns are put together,
// never added, so that the bits are those of one GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_link.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "kernels/cuda/columns.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

class RankPart {
 public:
  // Collective. All must outlive it.
  RankPart(dist::Communicator& group, const dist::Shares& shares, const ExecutorSpec& whole,
           const Device& device);

  // The spec of this rank's executor: its heads, and its part of the vocabulary.
  static ExecutorSpec local_spec(const dist::Shares& shares, const ExecutorSpec& whole);
  // On the device.
  static size_t bytes(const dist::Shares& shares, const ExecutorSpec& whole);

  const ExecutorSpec& whole() const { return whole_; }
  bool blocks() const { return link_->blocks(); }  // DeviceLink
  bool whole_attention() const { return shares_.whole_attention(); }
  bool has_heads() const { return shares_.heads(whole_.heads, whole_.kv_heads).query.size() > 0; }
  int64_t attended_cols() const { return query_bounds_.back(); }  // of all ranks
  // This rank's rows of a matrix of `total`.
  int64_t own(int64_t total) const { return shares_.rows(total).size(); }

  // This rank's columns of the residual stream, [rows, own(hidden)], in memory of this object: what is added
  // to them is gathered again. One at a time.
  float* take_columns(const float* residual, int64_t rows, const Launch& at);
  float* columns() const { return columns_.as<float>(); }  // the same memory, whatever is in it

  // whole[rows, total] of everybody's mine[rows, own(total)].
  void gather_rows(const float* mine, int64_t total, float* whole, int64_t rows, const Launch& at);
  // The same of what every rank's heads attended to, [rows, attended_cols()]: in memory of this object.
  const float* gather_heads(const float* mine, int64_t rows, const Launch& at);

  // Whole experts in each rank, instead of rows of every expert. chosen[pairs], on the device: (row, slot)
  // pairs' experts in all ranks' numbering. Waits for the stream. Gives how many of them are this rank's;
  // own_pairs(): which, and chosen[.. that] becomes their experts in this rank's numbering.
  bool whole_experts() const { return shares_.whole_experts(); }
  int64_t own_experts() const { return shares_.experts(whole_.experts).size(); }
  int64_t sort_pairs(int32_t* chosen, int64_t pairs, int32_t pairs_per_row, const Launch& at);
  // [own pairs], on the device: the row of each, pair / pairs_per_row.
  const int32_t* own_rows() const { return own_rows_.as<const int32_t>(); }
  const DeviceBuffer& scratch() const { return exchanged_; }  // [pairs, hidden], until the next exchange
  // outputs[own pairs, hidden] become outputs[pairs, own(hidden)], whoever made them: a rank sends each of
  // the others the columns that are the other's.
  void exchange_outputs(float* outputs, int64_t pairs, const Launch& at);

  // On the host: rank 0 gets the logits of all ranks, [rows, vocabulary], from everybody's own; the others
  // get nothing.
  std::span<const float> collect_logits(std::span<const float> own, int64_t rows);
  // Likewise the likeliest tokens; the others get their own.
  std::span<const int32_t> collect_greedy(std::span<const float> own, int64_t rows);

 private:
  void gather(const float* mine, std::span<const int64_t> bounds, float* whole, int64_t rows,
              const Launch& at);

  dist::Communicator& group_;
  const dist::Shares& shares_;
  const ExecutorSpec whole_;
  std::vector<int64_t> query_bounds_;  // [ranks + 1]: columns of the heads' outputs
  std::unique_ptr<DeviceLink> link_;
  DeviceBuffer columns_, exchanged_, attended_;
  std::vector<int64_t> counts_;  // [ranks]
  std::vector<float> whole_logits_, part_;
  // Of whole experts.
  DeviceBuffer own_rows_;
  PinnedBuffer lists_, made_;       // [3][pairs]: chosen, then rows and experts of the own; [pairs, hidden]
  std::vector<int32_t> own_pairs_;  // [own pairs]
  std::vector<int32_t> place_;      // [pairs]: which of what arrives, rank after rank; -1: nobody's
  std::vector<int64_t> pairs_of_;   // [ranks]
  std::vector<float> out_, in_;     // as they are sent and arrive
  std::vector<size_t> out_bytes_, in_bytes_;
  std::vector<int32_t> greedy_;
};

}  // namespace millrace::cuda
