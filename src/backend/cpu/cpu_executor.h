// The cpu executor: the slots, KV pools and step memory of one model, and the operations of backend.h as
// calls of kernels/cpu over them. It plans a step's attention, remembers the order of products for
// prefetching, and computes nothing itself.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/context_part.h"
#include "backend/cpu/memory.h"
#include "backend/cpu/rank_part.h"
#include "backend/cpu/weight.h"
#include "backend/cpu/workspace.h"
#include "backend/input_watcher.h"
#include "backend/mixed_part.h"
#include "base/thread_pool.h"
#include "kernels/cpu/attention/page_summary.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/paged_kv.h"
#include "kernels/cpu/state/time_mix.h"

namespace millrace::cpu {

class CpuExecutor final : public Executor, public WatchableExecutor, public MixedPart {
 public:
  CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool);
  // As a rank of a group: `spec` is the whole model's, weights, heads and KV blocks are this rank's part. All
  // ranks make the same calls in the same order, also of logits() and greedy_tokens(), which only rank 0
  // gets.
  CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool,
              dist::Communicator& group, const dist::Shares& shares);

  // As a rank of a group that a context is spread over: `spec` and batches are the whole ones, rows and KV
  // blocks this rank's part. All ranks make the same calls, as above.
  CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool,
              std::unique_ptr<ContextPart> context);

  void begin(const Batch& batch) override;
  void embed(const Embed& op) override;
  void layer_inputs(const LayerInputs& op) override;
  void end_layer(const EndLayer& op) override;
  void add_given(int layer) override;
  void norm_qkv(const NormQkv& op) override;
  void norm_latent_qkv(const NormLatentQkv& op) override;
  void rope_append_kv(const Rope& op) override;
  void attend(const Attend& op) override;
  void norm_mix(const NormMix& op) override;
  void mix(const StateMix& op) override;
  void time_mix(const TimeMix& op) override;
  void channel_mix_add(const ChannelMix& op) override;
  void project_add(const Projection& op) override;
  void ffn_add(const Ffn& op) override;
  void route(const Route& op) override;
  void experts_add(const Experts& op) override;
  void norm_residual(const Norm& op) override;
  void norm_logits(const Logits& op) override;
  std::span<const float> logits() override;
  std::span<const float> own_logits() override {
    return {work_->logits, batch_.logit_rows.size() * static_cast<size_t>(vocab_part_)};
  }
  std::span<const int32_t> greedy_tokens() override;
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override;
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;
  std::vector<float> read_slot(Slot slot) override;
  void write_slot(Slot slot, std::span<const float> values) override;
  void watch_inputs(InputWatcher* watcher) override { watcher_ = watcher; }

  void send_rows(bool routing) override;
  HostRows rows_out() override;
  void set_residual(std::span<const float> rows) override;
  void add_residual(std::span<const float> rows) override;
  void take_routed(const Norm& norm, const HostRows& rows) override;
  void keep_experts(std::span<const int32_t> local) override;

 private:
  CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool,
              std::unique_ptr<RankPart> part, std::unique_ptr<ContextPart> context);
  struct SlotShape {
    float* values;
    int64_t rows, cols, max_rows;
  };
  SlotShape shape_of(Slot slot);
  std::span<std::byte> block_bytes(int group, int32_t block) const;
  Context context() { return {kernels_, pool_, work_->scratch, &prefetch_order_}; }

  NormRows norm_of(const Norm& op, std::span<const int32_t> rows = {}) const;
  ActivationRows norm_for(const Norm& op, std::initializer_list<const Linear*> products,
                          std::span<const int32_t> rows = {});
  ActivationRows inner_for(const Linear& gate, const Linear& up, const Linear& down, Activation activation,
                           const ActivationRows& x);
  int64_t first_column() const { return part_ == nullptr ? 0 : part_->first_row(spec_.hidden); }
  void gather_columns(float* values);
  void norm_heads(const Norm& op, int64_t heads, int64_t dim, bool whole, float* values);
  void multiply(const Linear& weights, const float* x, int64_t cols, float* y);
  std::span<const int32_t> greedy_of_parts();
  std::span<const int32_t> greedy_over_ranks();
  std::span<const int32_t> own_logit_rows();
  using Updates = std::span<const LowRankRun>;
  void multiply_add(const Linear& weights, const ActivationRows& x, Updates updates, const Norm& norm_after,
                    float scale);
  void watch(std::initializer_list<const Linear*> products, const float* x, int64_t rows, int64_t stride);
  void watch_heads(const Linear& op, const float* x, int64_t head_stride);
  void watch_experts(const Experts& op);
  std::optional<ExpertUpdates> expert_updates_of(const Experts& op);
  void note_adapters(const Batch& batch);
  bool any_update(const Linear& op) const;
  Updates updates_of(const Linear& op, int place, std::span<const int32_t> adapters, const float* x,
                     int64_t stride);
  void shared_expert_add(const Experts& op);
  void normed_experts_add(const Experts& op);
  void run_experts(const Experts& op, float* to);
  void whole_experts_add(const Experts& op, const GateUp& gate_up, MoeWorkspace& moe, float* to);
  void scale_routing(float scale);
  void multiply_behind(const NormMix& op, int64_t to, int64_t cols);
  ShiftedRows shifted_rows(int layer) const;
  void norm_shifted(const Norm& norm, const ShiftedRows& rows, ShiftPlace place);
  const float* query_scales(const QueryGrowth& growth);
  PagedKv kv_of(int layer) const;
  PagedKv kv_at(ExecutorSpec::LayerPlace place) const;
  PagedKv index_keys_of(int layer) const;
  void index_keys(const NormLatentQkv& op, const ActivationRows& x);
  void append_index_keys(int layer);
  bool has_summaries(int group) const { return spec_.page_summary_bytes(group) > 0; }
  PageSummaries summaries_at(ExecutorSpec::LayerPlace place) const;
  void summarize_block(int group, int32_t block);
  PagedAttention attention_of(const Attend& op) const;
  void attend_pages(const Attend& op);
  void prepare_rotation(const Rope& op);
  bool leaves_rows_out(int layer) const;
  void keep_logit_rows(int64_t attended_cols);

  ExecutorSpec spec_;
  const KernelTable& kernels_;
  ThreadPool& pool_;
  std::unique_ptr<RankPart> part_;           // absent: this process has the whole model
  std::unique_ptr<ContextPart> over_ranks_;  // absent: this process has the whole context
  StepMemory memory_;
  std::unique_ptr<Workspace> work_;
  std::vector<Pages> kv_pools_;   // per group
  std::vector<int32_t> greedy_;   // [max logit rows]
  std::vector<Pages> summaries_;  // per group: [layers in group] of PageSummaries; empty ones where none are
  std::vector<float> whole_logits_;  // [max logit rows][vocab]: of all ranks, on rank 0
  std::vector<int32_t> whole_greedy_, own_logit_rows_;
  std::vector<int32_t> kept_rows_;  // [max logit rows]: 0, 1 ..: the logit rows when only they are kept
  PrefetchOrder prefetch_order_;
  std::vector<int32_t> row_adapters_;    // [rows], of this step's rows; empty: none of them has one
  std::vector<int32_t> logit_adapters_;  // [logit rows], likewise
  std::vector<ExpertUpdates::Pair> expert_pairs_[3];  // [adapters], of gate, up and down of experts
  std::vector<LowRankRun> runs_[3];                   // of the products whose A x lies in work_->low_rank

  // send_rows(true)'s: operations go on before anybody reads them.
  bool sends_copy_ = false;
  std::vector<float> sent_residual_, sent_weight_;
  std::vector<int32_t> sent_chosen_;

  InputWatcher* watcher_ = nullptr;

  Batch batch_{};                       // of this rank
  int64_t rows_ = 0;                    // tokens of this step; behind the last attention those that are kept
  ActivationFormats normed_formats_;    // that work_->input has of work_->normed
  int64_t vocab_part_ = 0;              // rows of the output matrix that this rank has
  bool deep_ = false;                   // attention of this step reads more than the caches hold
  const float* rotation_of_ = nullptr;  // inv_freq the cosines were made from
  float rotation_magnitude_ = 0;
  int64_t rotation_size_ = 0;
};

}  // namespace millrace::cpu
