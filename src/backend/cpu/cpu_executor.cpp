#include "backend/cpu/cpu_executor.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/rank_spec.h"
#include "base/check.h"
#include "dist/token_parts.h"
#include "kernels/cpu/attention/query_gates.h"
#include "kernels/cpu/elementwise/scale.h"
#include "kernels/cpu/embedding/embed.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/matmul/gemm_heads.h"
#include "kernels/cpu/norm/layer_inputs.h"

namespace millrace::cpu {
namespace {

// Products of a step whose order is remembered, at most, per layer and besides.
constexpr size_t kProductsPerLayer = 8, kProductsBesides = 4;

// So many tokens of keys and values go through the caches and push out what was prefetched before.
constexpr int32_t kDeepContext = 4096;

constexpr int64_t kHeadsPerTask = 64;  // that a task norms
constexpr int64_t kNormedPerTask = 4;  // rows

int64_t attended_columns(const ExecutorSpec& spec, const RankPart* part) {
  return part == nullptr ? int64_t{spec.heads} * spec.head_dim : part->head_columns();
}

}  // namespace

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool)
    : CpuExecutor(spec, kernels, pool, nullptr, nullptr) {}

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool,
                         dist::Communicator& group, const dist::Shares& shares)
    : CpuExecutor(rank_spec(shares, spec), kernels, pool, std::make_unique<RankPart>(group, shares, spec),
                  nullptr) {
  if (group.rank() == 0) whole_logits_.resize(static_cast<size_t>(spec.max_logit_rows) * spec.vocab);
}

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool,
                         std::unique_ptr<ContextPart> context)
    : CpuExecutor(ContextPart::local_spec(spec), kernels, pool, nullptr, std::move(context)) {}

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool,
                         std::unique_ptr<RankPart> part, std::unique_ptr<ContextPart> context)
    : spec_(spec),
      kernels_(kernels),
      pool_(pool),
      part_(std::move(part)),
      over_ranks_(std::move(context)),
      memory_(workspace_bytes(spec, attended_columns(spec, part_.get()), pool.size(),
                              kernels.quantize_bf16_tile != nullptr),
              "workspace"),
      prefetch_order_(kProductsPerLayer * spec.layers.size() + kProductsBesides) {
  Arena arena(memory_.data());
  work_ = std::make_unique<Workspace>(spec, attended_columns(spec, part_.get()), pool.size(),
                                      kernels.quantize_bf16_tile != nullptr, arena);
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    // A vector behind the last value may be loaded past it: one more cache line.
    const size_t blocks = static_cast<size_t>(spec.kv_groups[g].num_blocks);
    kv_pools_.emplace_back(spec.kv_block_bytes(static_cast<int>(g)) * blocks + 64, "KV cache");
    const size_t summary = spec.page_summary_bytes(static_cast<int>(g));
    if (summary > 0) {
      summaries_.emplace_back(summary * blocks, "page summaries");
    } else {
      summaries_.emplace_back();
    }
  }
  greedy_.resize(static_cast<size_t>(spec.max_logit_rows));
  kept_rows_.resize(static_cast<size_t>(spec.max_logit_rows));
  std::iota(kept_rows_.begin(), kept_rows_.end(), 0);
  if (spec.adapter_rank == 0) return;
  const size_t most = static_cast<size_t>(std::max(spec.max_tokens, spec.max_logit_rows));
  row_adapters_.reserve(most);
  logit_adapters_.reserve(most);
  const size_t chosen = static_cast<size_t>(spec.max_tokens) * static_cast<size_t>(spec.experts_per_token);
  for (std::vector<LowRankRun>& runs : runs_) runs.reserve(std::max(most, chosen));
}

// ---------------------------------------------------------------- the step

void CpuExecutor::begin(const Batch& whole) {
  MILLRACE_CHECK(whole.tokens.size() <= static_cast<size_t>(spec_.max_tokens));
  MILLRACE_CHECK(whole.logit_rows.size() <= static_cast<size_t>(spec_.max_logit_rows));
  batch_ = over_ranks_ == nullptr ? whole : over_ranks_->localize(whole);
  const Batch& batch = batch_;
  rows_ = static_cast<int64_t>(batch.tokens.size());
  rotation_of_ = nullptr;
  normed_formats_ = {};
  size_t sequences = 0;
  for (const SequenceSlice& slice : batch.sequences) {
    if (slice.num_tokens == 0) continue;
    MILLRACE_CHECK(sequences < batch.tokens.size());
    work_->sequences[sequences] = {slice.first_row, slice.num_tokens,  slice.context_len,
                                   slice.both_ways, slice.second_text, slice.sparse_pages};
    for (size_t g = 0; g < kv_pools_.size(); ++g) work_->tables[g][sequences] = slice.tables[g];
    ++sequences;
  }
  work_->attention_plan.begin_step({work_->sequences, sequences});
  for (std::optional<AttentionPlan>& plan : work_->group_plans) {
    if (plan) plan->begin_step({work_->sequences, sequences});
  }
  MILLRACE_CHECK(work_->attention_plan.rows() == rows_);
  note_adapters(batch);
  deep_ = work_->attention_plan.longest_context() > kDeepContext;
  prefetch_order_.begin_step(pool_, rows_ <= kSmallBatchRows);
}

// ---------------------------------------------------------------- the embedding

void CpuExecutor::embed(const Embed& op) {
  embed_rows(context(), own(*op.table).matrix.view, batch_.tokens.data(), rows_, op.scale, work_->residual);
  const auto view_of = [](const Weight* w) { return w == nullptr ? nullptr : &own(*w).matrix.view; };
  if (op.positions != nullptr || op.types != nullptr) {
    const AttentionPlan& plan = work_->attention_plan;
    add_position_rows(
        context(), view_of(op.positions), view_of(op.types), plan.positions(),
        [&plan](int64_t row) {
          const AttentionSequence& s = plan.sequences()[plan.sequence_of()[row]];
          return plan.positions()[row] >= s.second_text ? 1 : 0;
        },
        rows_, spec_.hidden, work_->residual, work_->normed);
  }
  norm_residual(op.norm);
  for (const GivenRow& given : batch_.given)
    std::copy_n(given.values, spec_.hidden, work_->residual + int64_t{given.row} * spec_.hidden);
}

void CpuExecutor::norm_residual(const Norm& op) {
  if (!op.present()) return;
  norm_rows(
      context(),
      {weights_of(op), work_->residual, spec_.hidden, work_->residual, spec_.hidden, rows_, spec_.hidden},
      kNormedPerTask);
}

// ---------------------------------------------------------------- norms and dense products

// normed[i] = norm(residual[rows[i]]), or of every row when `rows` is empty.
NormRows CpuExecutor::norm_of(const Norm& op, std::span<const int32_t> rows) const {
  return {weights_of(op), work_->residual,
          spec_.hidden,   work_->normed,
          spec_.hidden,   rows.empty() ? rows_ : std::ssize(rows),
          spec_.hidden,   rows.empty() ? nullptr : rows.data()};
}

// The same, done, as the input of these products.
ActivationRows CpuExecutor::norm_for(const Norm& op, std::initializer_list<const Linear*> products,
                                     std::span<const int32_t> rows) {
  const NormRows norm = norm_of(op, rows);
  normed_formats_ = {};
  for (const Linear* product : products) {
    normed_formats_ |= formats_for(kernels_, {linear_of(*product)}, norm.rows);
  }
  norm_quantize_rows(context(), norm, normed_formats_, work_->input);
  return work_->input.rows(work_->normed, norm.rows, spec_.hidden, normed_formats_);
}

void CpuExecutor::norm_heads(const Norm& op, int64_t heads, int64_t dim, bool whole, float* values) {
  if (!op.present()) return;
  const int64_t cols = whole ? heads * dim : dim;
  norm_rows(context(), {weights_of(op), values, cols, values, cols, whole ? rows_ : rows_ * heads, cols},
            whole ? kNormedPerTask : kHeadsPerTask);
}

// values[rows][hidden], of which this rank made its columns, get the others'.
void CpuExecutor::gather_columns(float* values) {
  if (part_ == nullptr) return;
  part_->gather_rows(pool_, values + first_column(), spec_.hidden, values, spec_.hidden, rows_);
}

// residual += scale * norm_after(x W^T + b + updates)
void CpuExecutor::multiply_add(const Linear& weights, const ActivationRows& x, Updates updates,
                               const Norm& norm_after, float scale) {
  const bool computes = weights.weight->rows > 0;  // a rank may have no rows of a small matrix
  if (!norm_after.present() && scale == 1.0f) {
    const GemmProduct product{linear_of(weights), work_->residual + first_column(), spec_.hidden};
    if (computes) gemm_add(context(), product, x, rows_);
    low_rank_add(context(), updates, weights.weight->rows, product.out, spec_.hidden);
    return gather_columns(work_->residual);
  }
  const GemmProduct product{linear_of(weights), work_->normed + first_column(), spec_.hidden};
  if (computes) gemm(context(), {&product, 1}, x, rows_);
  low_rank_add(context(), updates, weights.weight->rows, product.out, spec_.hidden);
  gather_columns(work_->normed);
  add_normed_rows(context(), weights_of(norm_after), scale, rows_, spec_.hidden, work_->normed,
                  work_->residual);
}

void CpuExecutor::norm_qkv(const NormQkv& op) {
  if (part_ != nullptr && !part_->has_heads()) return;
  // Another layer's keys and values: queries alone. Values that are the keys' product: a copy of it.
  const bool keys = op.k.weight != nullptr, copies = keys && op.v.weight == op.k.weight;
  const size_t count = !keys ? 1 : copies ? 2 : 3;
  const Linear *k = keys ? &op.k : &op.q, *v = keys ? &op.v : &op.q;
  const ActivationRows x = norm_for(op.norm, {&op.q, k, v});
  float* query = op.gated ? work_->projected : work_->query;
  const GemmProduct products[] = {{linear_of(op.q), query, op.q.weight->rows},
                                  {linear_of(*k), work_->key, k->weight->rows},
                                  {linear_of(*v), work_->value, v->weight->rows}};
  prefetch_order_.pause_after_next_product(deep_);
  gemm(context(), {products, count}, x, rows_);
  const Linear* const linears[] = {&op.q, k, v};
  const Linear none;
  watch({&op.q, &op.k, copies ? &none : &op.v}, work_->normed, rows_, spec_.hidden);
  for (size_t i = 0; i < count; ++i) {
    const Updates updates =
        updates_of(*linears[i], static_cast<int>(i), row_adapters_, work_->normed, spec_.hidden);
    low_rank_add(context(), updates, products[i].stride, products[i].out, products[i].stride);
  }
  if (op.gated) {
    split_gates(work_->projected, rows_ * spec_.heads, spec_.head_dim, work_->query, work_->attention_gate);
  }
  const int64_t dim = op.head_dim > 0 ? op.head_dim : spec_.head_dim;
  norm_heads(op.q_norm, spec_.heads, dim, op.norm_whole, work_->query);
  if (!keys) return;
  if (copies) std::copy_n(work_->key, rows_ * k->weight->rows, work_->value);
  norm_heads(op.k_norm, k->weight->rows / dim, dim, op.norm_whole, work_->key);
  norm_heads(op.v_norm, v->weight->rows / dim, dim, false, work_->value);
}

// y[rows][out] = x[rows][cols] W^T, x as it is.
void CpuExecutor::multiply(const Linear& weights, const float* x, int64_t cols, float* y) {
  watch({&weights}, x, rows_, cols);
  const ActivationFormats formats = formats_for(kernels_, {linear_of(weights)}, rows_);
  const GemmProduct product{linear_of(weights), y, weights.weight->rows};
  gemm(context(), {&product, 1}, quantize_rows(context(), formats, x, rows_, cols, work_->input), rows_);
}

// Queries and keys are [rope | rank] of every head, and of the one key that heads have in common: the rope
// parts go where they are rotated, the nope part of a query is multiplied by its head's k_b and becomes
// [rank], as the cached key is.
void CpuExecutor::norm_latent_qkv(const NormLatentQkv& op) {
  const LatentShape& s = spec_.latent;
  const int64_t dim = spec_.head_dim, heads = spec_.heads, q_dim = s.nope + s.rope, kv_dim = s.rank + s.rope;
  float* q = work_->head_rows;            // [rows][heads][nope | rope]
  float* compressed = work_->compressed;  // [rows][rank | rope], then [rows][q_rank]
  const bool compresses = op.q_a.weight != nullptr;
  const bool indexes = op.index_q.weight != nullptr;
  const ActivationRows x =
      norm_for(op.norm, {compresses ? &op.q_a : &op.q, &op.kv_a, indexes ? &op.index_k : &op.kv_a,
                         indexes ? &op.index_weights : &op.kv_a});
  watch({compresses ? &op.q_a : &op.q, &op.kv_a, &op.index_k, &op.index_weights}, work_->normed, rows_,
        spec_.hidden);
  if (indexes) index_keys(op, x);
  const GemmProduct kv{linear_of(op.kv_a), compressed, kv_dim};
  gemm(context(), {&kv, 1}, x, rows_);
  const NormWeights kv_norm = weights_of(op.kv_a_norm);
  pool_.parallel_for(rows_, kNormedPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(compressed + row * kv_dim + s.rank, s.rope, work_->key + row * dim);
      norm_one(kernels_, kv_norm, compressed + row * kv_dim, s.rank, work_->key + row * dim + s.rope);
    }
  });
  if (compresses) {
    const GemmProduct q_a{linear_of(op.q_a), compressed, s.q_rank};
    gemm(context(), {&q_a, 1}, x, rows_);
    norm_rows(context(),
              {weights_of(op.q_a_norm), compressed, s.q_rank, compressed, s.q_rank, rows_, s.q_rank},
              kNormedPerTask);
    multiply(op.q, compressed, s.q_rank, q);
    if (indexes) multiply(op.index_q, compressed, s.q_rank, work_->index_query);
    normed_formats_ = {};
  } else {
    const GemmProduct product{linear_of(op.q), q, heads * q_dim};
    gemm(context(), {&product, 1}, x, rows_);
  }
  pool_.parallel_for(rows_, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * heads; i < end * heads; ++i) {
      std::copy_n(q + i * q_dim + s.nope, s.rope, work_->query + i * dim);
    }
  });
  watch_heads(op.k_b, q, q_dim);
  if (watcher_ != nullptr) watcher_->see_latent(*op.k_b.weight, s.rank, work_->key + s.rope, rows_, dim);
  gemm_heads(context(),
             {linear_of(op.k_b), q, heads * q_dim, q_dim, work_->query + s.rope, heads * dim, dim, rows_},
             work_->head_quantized);
}

void CpuExecutor::project_add(const Projection& op) {
  if (rows_ == 0) return;
  if (op.head_values.weight != nullptr) {
    const LatentShape& s = spec_.latent;
    const int64_t heads = spec_.heads, dim = spec_.head_dim, cols = heads * s.value;
    watch_heads(op.head_values, work_->attention + s.rope, dim);
    gemm_heads(context(),
               {linear_of(op.head_values), work_->attention + s.rope, heads * dim, dim, work_->head_rows,
                cols, s.value, rows_},
               work_->head_quantized);
    watch({&op.linear}, work_->head_rows, rows_, cols);
    const ActivationFormats made = formats_for(kernels_, {linear_of(op.linear)}, rows_);
    return multiply_add(op.linear,
                        quantize_rows(context(), made, work_->head_rows, rows_, cols, work_->input), {},
                        op.norm_after, op.scale);
  }
  const ActivationFormats formats = formats_for(kernels_, {linear_of(op.linear)}, rows_);
  if (part_ != nullptr && !part_->whole_attention())
    part_->gather_heads(pool_, work_->attention, work_->attended, rows_);
  const ActivationRows x =
      quantize_rows(context(), formats, work_->attended, rows_, op.linear.weight->cols, work_->input);
  const int64_t cols = op.linear.weight->cols;
  watch({&op.linear}, work_->attended, rows_, cols);
  const Updates updates = updates_of(op.linear, 0, row_adapters_, work_->attended, cols);
  multiply_add(op.linear, x, updates, op.norm_after, op.scale);
}

void CpuExecutor::ffn_add(const Ffn& op) {
  if (rows_ == 0) return;
  const Linear& gate = op.gate.weight != nullptr ? op.gate : op.up;
  const ActivationRows x = norm_for(op.norm, {&gate, &op.up});
  const ActivationRows inner = inner_for(op.gate, op.up, op.down, op.activation, x);
  const Updates updates = updates_of(op.down, 2, row_adapters_, work_->inner, op.down.weight->cols);
  multiply_add(op.down, inner, updates, op.norm_after, op.scale);
}

// act(gate x) * (up x) with what adapters add, as the input of `down`: all of it, also what other ranks make.
ActivationRows CpuExecutor::inner_for(const Linear& gate, const Linear& up, const Linear& down,
                                      Activation activation, const ActivationRows& x) {
  ActivationFormats formats = formats_for(kernels_, {linear_of(down)}, rows_);
  const int64_t cols = up.weight->rows, whole = down.weight->cols;
  watch({&gate, &up}, work_->normed, rows_, spec_.hidden);
  GateUp op = gate_up_of(gate, up, activation);
  op.gate_updates =
      updates_of(gate.weight == nullptr ? up : gate, 0, row_adapters_, work_->normed, spec_.hidden);
  if (gate.weight != nullptr) op.up_updates = updates_of(up, 1, row_adapters_, work_->normed, spec_.hidden);
  if (part_ == nullptr) {
    formats.float32 |= watcher_ != nullptr || any_update(down);  // A reads floats
    const InnerActivations inner{work_->inner, work_->inner_quantized, formats};
    gate_up(context(), op, x, rows_, inner);
    watch({&down}, inner.values, rows_, cols);
    return inner.quantized.rows(inner.values, rows_, cols, formats);
  }
  if (cols > 0) gate_up(context(), op, x, rows_, {part_->inner(), {}, {.float32 = true}});
  part_->gather_rows(pool_, part_->inner(), cols, work_->inner, whole, rows_);
  return quantize_rows(context(), formats, work_->inner, rows_, whole, work_->inner_quantized);
}

void CpuExecutor::norm_logits(const Logits& op) {
  const std::span<const int32_t> rows = own_logit_rows();
  if (rows.empty()) return;
  const ActivationRows x = norm_for(op.norm, {&op.output}, rows);
  vocab_part_ = op.output.weight->rows;
  const GemmProduct product{linear_of(op.output), work_->logits, vocab_part_};
  if (vocab_part_ > 0) gemm(context(), {&product, 1}, x, std::ssize(rows));
  watch({&op.output}, work_->normed, std::ssize(rows), spec_.hidden);
  low_rank_add(context(), updates_of(op.output, 0, logit_adapters_, work_->normed, spec_.hidden), vocab_part_,
               work_->logits, vocab_part_);
  if (op.scale == 1.0f && op.softcap == 0.0f) return;
  scale_softcap(context(), op.scale, op.softcap, std::ssize(rows) * vocab_part_, work_->logits);
}

std::span<const float> CpuExecutor::logits() {
  if (over_ranks_ != nullptr)
    return over_ranks_->collect<float>(work_->logits, static_cast<size_t>(spec_.vocab), whole_logits_);
  if (part_ != nullptr) {
    const int64_t rows = std::ssize(batch_.logit_rows);
    if (rows > 0) part_->collect_rows(pool_, work_->logits, whole_logits_.data(), spec_.vocab, rows);
    return {whole_logits_.data(), whole_logits_.empty() ? 0 : static_cast<size_t>(rows * spec_.vocab)};
  }
  return {work_->logits, batch_.logit_rows.size() * static_cast<size_t>(spec_.vocab)};
}

std::span<const int32_t> CpuExecutor::greedy_tokens() {
  if (part_ != nullptr) return greedy_of_parts();
  if (over_ranks_ != nullptr) return greedy_over_ranks();
  argmax_rows(context(), work_->logits, std::ssize(batch_.logit_rows), spec_.vocab, work_->argmax,
              greedy_.data());
  return {greedy_.data(), batch_.logit_rows.size()};
}

std::span<const int32_t> CpuExecutor::greedy_of_parts() {
  const std::span<int32_t> tokens(greedy_.data(), batch_.logit_rows.size());
  std::vector<float> values(tokens.size());
  std::fill(tokens.begin(), tokens.end(), dist::kNoTokens);
  if (vocab_part_ > 0) {
    argmax_rows(context(), work_->logits, std::ssize(tokens), vocab_part_, work_->argmax, greedy_.data());
  }
  const auto first = static_cast<int32_t>(part_->first_row(spec_.vocab));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0) continue;
    values[i] = work_->logits[static_cast<int64_t>(i) * vocab_part_ + tokens[i]];
    tokens[i] += first;
  }
  if (!tokens.empty()) dist::collect_largest(part_->group(), tokens, values);
  return tokens;
}

void CpuExecutor::read_hidden(const Norm& norm, int32_t row, std::span<float> to) {
  const int64_t rows = over_ranks_ == nullptr ? rows_ : over_ranks_->rows();
  MILLRACE_CHECK(row >= 0 && row < rows && std::ssize(to) == spec_.hidden);
  const float* from = over_ranks_ == nullptr ? work_->residual + row * int64_t{spec_.hidden}
                                             : over_ranks_->hidden(row, spec_.hidden);
  norm_one(kernels_, weights_of(norm), from, spec_.hidden, to.data());
}

// ---------------------------------------------------------------- slots and blocks

CpuExecutor::SlotShape CpuExecutor::shape_of(Slot slot) {
  const Workspace& w = *work_;
  switch (slot) {
    case Slot::kResidual:
      return {w.residual, rows_, spec_.hidden, spec_.max_tokens};
    case Slot::kQuery:
      return {w.query, rows_, w.query_cols, spec_.max_tokens};
    case Slot::kKey:
      return {w.key, rows_, w.kv_cols, spec_.max_tokens};
    case Slot::kValue:
      return {w.value, rows_, spec_.kv_parts() == 1 ? 0 : w.kv_cols, spec_.max_tokens};
    case Slot::kAttention:
      return {w.attention, rows_, w.query_cols, spec_.max_tokens};
    case Slot::kLogits:
      break;
  }
  return {w.logits, static_cast<int64_t>(batch_.logit_rows.size()), spec_.vocab, spec_.max_logit_rows};
}

std::span<std::byte> CpuExecutor::block_bytes(int group, int32_t block) const {
  if (over_ranks_ != nullptr) block = over_ranks_->local_block(group, block);
  const size_t bytes = spec_.kv_block_bytes(group);
  MILLRACE_CHECK(block >= 0 && block < spec_.kv_groups[group].num_blocks);
  return {reinterpret_cast<std::byte*>(kv_pools_[group].data()) + static_cast<size_t>(block) * bytes, bytes};
}

void CpuExecutor::read_block(int group, int32_t block, std::span<std::byte> to) {
  const std::span<std::byte> from = block_bytes(group, block);
  MILLRACE_CHECK(to.size() == from.size());
  std::memcpy(to.data(), from.data(), to.size());
}

void CpuExecutor::write_block(int group, int32_t block, std::span<const std::byte> from) {
  const std::span<std::byte> to = block_bytes(group, block);
  MILLRACE_CHECK(to.size() == from.size());
  std::memcpy(to.data(), from.data(), to.size());
  summarize_block(group, block);
}

void CpuExecutor::copy_block(int group, int32_t from, int32_t to) {
  const std::span<std::byte> source = block_bytes(group, from);
  std::memcpy(block_bytes(group, to).data(), source.data(), source.size());
  summarize_block(group, to);
}

std::vector<float> CpuExecutor::read_slot(Slot slot) {
  const SlotShape s = shape_of(slot);
  return {s.values, s.values + s.rows * s.cols};
}

void CpuExecutor::write_slot(Slot slot, std::span<const float> values) {
  const SlotShape s = shape_of(slot);
  MILLRACE_CHECK(static_cast<int64_t>(values.size()) <= s.max_rows * s.cols);
  std::copy(values.begin(), values.end(), s.values);
}

}  // namespace millrace::cpu
