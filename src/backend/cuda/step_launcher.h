// Launches the kernels of a recorded step. For each operation: the GEMV kernels for one to four rows of
// packed weights, the GEMM kernels for more, the generic ones for every other type. Which of them runs never
// changes a row's bits: GEMV and GEMM agree, and the rest is chosen by type and shape alone.
#pragma once

#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "backend/cuda/batch_arrays.h"
#include "backend/cuda/cuda_weight.h"
#include "backend/cuda/rank_part.h"
#include "backend/cuda/step.h"
#include "backend/cuda/workspace.h"
#include "kernels/cuda/attention/sparse.h"
#include "kernels/cuda/attention/split_plan.h"
#include "kernels/cuda/gemm/dense.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/low_rank.h"
#include "kernels/cuda/gemm/round_fp8.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/linear/short_conv.h"
#include "kernels/cuda/linear/state_rows.h"
#include "kernels/cuda/linear/state_scan.h"
#include "kernels/cuda/moe/moe.h"

namespace millrace::cuda {

class StepLauncher {
 public:
  // Claims the whole grid of the GPU, if it is free: no other executor of it has kernels that wait then.
  // part: of a rank, whose own heads and part of the vocabulary `spec` has; null: the whole model is here.
  StepLauncher(const ExecutorSpec& spec, const Workspace& workspace, const Launch& at, RankPart* part);

  // The index of a table of rotary angles, uploaded at the first sight of these values.
  // axes: which of three positions turns a pair, where a step has them (Batch::rope_positions).
  size_t angle_table(std::span<const float> inv_freq, float magnitude, std::span<const uint8_t> axes);
  const float* inv_freq(size_t table) const { return angle_tables_[table].inv_freq.as<const float>(); }

  // The norm of the residual stream's `rows` rows, [rows, hidden], on the device until the next launch.
  const float* hidden(const Norm& norm, int64_t rows);

  // Bounds of the keys of a block that came from elsewhere, where sparse attention wants them.
  void summarize_block(int group, int32_t block);

  // `batch_device`: batch's arrays on the device; the tokens among them are written when plan.takes_sampled.
  // before(i): called ahead of operation i's launches, where it has some of its own.
  void launch(const std::vector<StepOp>& ops, const StepPlan& plan, const BatchArrays& batch,
              int32_t* batch_device, const std::function<void(size_t)>& before = {});

 private:
  // Rows that linear layers multiply: of x, normed when there is a norm.
  struct Rows {
    const float* x;
    int64_t count, cols;
    const Norm* norm = nullptr;
    const int32_t* source = nullptr;  // row of x for each
    const DeviceBuffer* normed;       // where the generic kernels keep normed rows
    bool logits = false;              // rows of logits: their adapters are other rows'
    const float* up = nullptr;  // x is a gate: act(x) * up is multiplied, of more than kMaxGemvRows rows
    ActivationKind activation = ActivationKind::kSilu;
  };
  struct Target {
    const Linear& linear;
    float* out;
    int64_t expected_rows;
  };

  void operator()(const Embed& op);
  void operator()(const NormQkv& op);
  void operator()(const NormLatentQkv& op);  // step_latent.cpp
  void operator()(const RopeOp& op);
  void operator()(const Attend& op);
  void operator()(const Projection& op);
  void operator()(const Ffn& op);
  void operator()(const Route& op);
  void operator()(const Experts& op);
  // Gemma 4, images (step_inputs.cpp).
  void operator()(const LayerInputs& op);
  void operator()(const EndLayer& op);
  void operator()(const GivenOp& op);
  void operator()(const NormResidualOp& op) { norm_rows(op.norm, plan_.rows, spec_.hidden, w_.residual); }
  void operator()(const Logits& op);
  void operator()(const ArgmaxOp& op);
  void operator()(const SampleOp& op);
  void operator()(const ChooseOp& op);
  void operator()(const KeepExpertsOp& op);
  void operator()(const AddRowsOp& op);
  // Layers with a state (state_launcher.cpp).
  void operator()(const NormMix& op);
  void operator()(const StateMix& op);
  ShortConv convolve(const StateMix& op);
  void prepare_state(const StateMix& op, const StatePool& pool);
  void channel_scan(const ShortConv& conv);
  void finish_state(const StateMix& op);
  // RWKV 7 (step_shift.cpp).
  void operator()(const TimeMix& op);
  void operator()(const ChannelMix& op);
  void shift_rows(int layer, int64_t place, const float* by, bool keep);
  // The products of a TimeMix, [rows][hidden] each.
  struct TimeMixProducts {
    float *r, *k, *v, *decay, *rate, *mixed, *gate;
  };
  void multiply_shifted(const TimeMix& op, const TimeMixProducts& to);
  void scan_time_mix(const TimeMix& op, const TimeMixProducts& of);
  void multiply_behind(const NormMix& op, const PlaceRows& place, std::span<const Target> targets);
  template <class Op>
  void visit(const Op& op) {
    (*this)(op);
  }

  void prepare_angles(const std::vector<StepOp>& ops);
  bool fuses_rope(const std::vector<StepOp>& ops, size_t at) const;
  void linears(const Rows& rows, std::span<const Target> targets, bool add);
  void products(const Rows& rows, std::span<const Target> targets, bool add);
  void full_products(const Rows& rows, std::span<const Target> targets, bool add);
  // Steps with prompts that FP8 products compute (step_fp8.cpp).
  void products_in_runs(const Rows& rows, std::span<const Target> targets, bool add);
  Fp8Rows fp8_rows(int64_t cols, int64_t rows) const;
  void round_fp8(const Rows& rows) const;
  void fp8_product(const Linear& op, int64_t rows, void* out, DenseOut type, bool add);
  bool fp8_ffn(const Ffn& op);
  void fp8_gate_up(const Rows& rows, const Ffn& op);
  void packed_linears(const Rows& rows, std::span<const Target> targets, PackedFormat format, bool add);
  // What adapters add to products of these rows (step_adapters.cpp).
  bool any_update(const Weight* weight) const;
  bool any_update(std::span<const Target> targets) const;
  bool any_update(const Experts& op) const;  // of the routed ones
  void add_updates(const Rows& rows, std::span<const Target> targets);
  // The same of pairs: out[pair, :], from x[pair / divide] and w_.chosen[pair].
  void add_expert_updates(const Linear& op, const DeviceBuffer& x, int32_t divide, const DeviceBuffer& out);
  void launch_updates(LowRankUpdates& op, const Weight* weight);
  // Rows of the table, as they are in the residual stream or `out`: out[t, :] = scale * table[indices[t], :].
  void look_up(const Weight& table, const int32_t* indices, float scale, const DeviceBuffer& out);
  void norm_rows(const Norm& op, int64_t rows, int64_t size, const DeviceBuffer& values);  // in place
  void norm_heads(const Norm& op, int64_t heads, int64_t dim, bool whole, const DeviceBuffer& values);
  // residual += scale * norm_after(linear(x)), x [rows, cols].
  void linear_add(const Linear& op, const Rows& x, const Norm& norm_after, float scale);
  void add_normed(const Norm& norm_after, float scale);  // what of it is in w_.normed
  // The activation of gate (and up, or null), of `size` values.
  void activate(millrace::Activation kind, int64_t size, float* gate, const float* up);
  // Down of act(gate n) * up n, n = norm(x) or x: into w_.gate, [rows, what down multiplies].
  void gate_up(const Rows& rows, const Linear& gate, const Linear& up, millrace::Activation activation);
  // Without the activation, which the rounding of down's rows does: into w_.gate and w_.up.
  bool gated_products(const Ffn& op, const Rows& rows);
  // What `down` multiplies, [rows, its columns]: w_.gate, with other ranks' columns where there are any.
  const DeviceBuffer& whole_inner(const Linear& down, int64_t rows);
  // Of the residual stream what this rank has: all columns, or its own, [rows, own_hidden()].
  int64_t own_hidden() const { return part_ == nullptr ? spec_.hidden : part_->own(spec_.hidden); }
  bool has_heads() const { return part_ == nullptr || part_->has_heads(); }
  void shared_expert_add(const Experts& op, float* to);
  void normed_experts_add(const Experts& op);
  void run_experts(const Experts& op, float* to);
  // Into w_.down, [pairs(), rows of down], from x[pair / divide] and w_.chosen[pair].
  void expert_products(const Experts& op, const DeviceBuffer& x, int32_t divide);
  bool whole_experts() const { return part_ != nullptr && part_->whole_experts(); }
  bool uses_paged_attention(const Attend& op) const {
    return kinds_of(op.layer).paged && op.softcap == 0.0f && op.chunk == 0 && !op.bidirectional;
  }
  bool gated_epilogue(const Experts& op) const;
  // Whether the experts' first product has the activation in its epilogue, of both matrices at once.
  bool fuses_gate_up(const Experts& op) const;
  void choose(const Route& op);  // where the weights are no softmax of the scores
  bool gemv_ffn(const Ffn& op);
  void route_top_k();
  void check_experts(const Experts& op) const;
  Router router_of(const Route& op) const;
  bool has_router_kernel(const Route& op) const;
  GemvExperts gemv_experts(const Experts& op) const;
  bool launch_persistent(const std::vector<StepOp>& ops, size_t at);
  void grouped_gate_up(const Experts& op, const DeviceBuffer& x, int32_t divide);
  bool rounds_act(const Experts& op) const;
  void grouped_linear(const Linear& op, const Bf16Rows& x, const DeviceBuffer& out);
  // One matrix per pair's expert, of whatever type: out[pair, :] from x[pair / divide, :].
  void expert_linear(const Linear& op, const DeviceBuffer& x, int32_t divide, const DeviceBuffer& out);
  void round_pairs(const DeviceBuffer& x, int32_t copies, const PackedMatrix& w);
  int64_t pairs() const { return pairs_; }
  int32_t head_dim_of(int layer) const {
    return spec_.head_dim_of(spec_.layers[static_cast<size_t>(layer)].group);
  }
  int32_t kv_heads_of(int layer) const {
    return spec_.kv_heads_of(spec_.layers[static_cast<size_t>(layer)].group);
  }
  LayerCache pool_of(int layer) const;  // without the batch
  LayerCache cache_of(int layer) const;
  StatePool state_pool_of(int layer) const;
  StateSequences state_sequences() const;
  // Rows of the step that attend with one launch.
  struct AttendedRows {
    LayerCache cache;  // whose arrays of rows begin with the first of these
    int64_t first = 0, count = 0;
    bool single = false;        // every row is a sequence of its own
    int32_t last_position = 0;  // the largest of any
    const int32_t* chunks = nullptr;
    int32_t num_chunks = 0;
  };
  AttendedRows rows_at(int layer, int64_t first, int64_t count) const;
  bool attends_in_chunks() const { return at_.device.has_wgmma() && plan_.rows >= kMinPrefillRows; }
  void attend(const Attend& op);
  void attend(const Attend& op, const AttendedRows& rows);
  void attend_both_ways(const Attend& op);
  // Sparse attention (step_sparse.cpp).
  bool has_summaries(int layer) const;
  bool chooses_pages(const Attend& op) const;
  PageSummaries summaries_of(int layer) const;
  SparseRows sparse_rows_at(int layer, int64_t first, int64_t count) const;
  void summarize_rows(int layer);
  void sparse_attention(const Attend& op);
  void attend_to_pages(const Attend& op, int64_t first, int64_t count);
  // Latent attention (step_latent.cpp).
  bool is_latent() const { return spec_.latent.rank > 0; }
  void latent_attention(const Attend& op);
  void latent_attention(const Attend& op, const AttendedRows& rows);
  LayerCache index_cache_of(int layer) const;
  void append_index_keys(const RopeOp& op);
  void indexed_attention(const Attend& op);
  void attend_to_tokens(const Attend& op, int64_t first, int64_t count);
  void head_values(const Linear& op);  // of what was attended, into w_.query, [rows, heads * value]
  void paged_attention(const Attend& op, const AttendedRows& rows);
  void tile_attention(const Attend& op, const AttendedRows& rows, const AttentionLimits& limits);
  const int32_t* in_batch(size_t offset) const { return batch_device_ + offset; }

  const ExecutorSpec& spec_;
  const Workspace& w_;
  const Launch at_;
  RankPart* const part_;
  const bool latent_wgmma_;
  // Which kernels attend in a group of layers: its heads decide.
  struct AttentionKinds {
    bool paged = false, tiled = false;
  };
  std::vector<AttentionKinds> attention_kinds_;  // [groups]
  AttentionKinds kinds_of(int layer) const {
    return attention_kinds_[static_cast<size_t>(spec_.layers[static_cast<size_t>(layer)].group)];
  }

  struct AngleTable {
    std::vector<float> values;
    std::vector<uint8_t> axes;
    float magnitude = 1.0f;
    DeviceBuffer inv_freq, device_axes;
    DeviceBuffer angles;  // [max_tokens, half] cos and sin, of the step's positions
  };
  std::deque<AngleTable> angle_tables_;  // a model has one or two

  // Of the step being launched.
  StepPlan plan_;
  const BatchArrays* batch_ = nullptr;
  const int32_t* batch_device_ = nullptr;
  int64_t pairs_ = 0;  // (row, slot) pairs whose experts are multiplied: all of the step's, or this rank's
  const RopeOp* fused_rope_ = nullptr;  // the next attention rotates and appends
  GridClaim whole_grid_;
};

}  // namespace millrace::cuda
