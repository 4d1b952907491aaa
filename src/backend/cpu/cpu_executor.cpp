#include "backend/cpu/cpu_executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/rope_append_kv.h"
#include "kernels/cpu/embedding/embed.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

// Products of a step whose order is remembered, at most, per layer and besides.
constexpr size_t kProductsPerLayer = 6, kProductsBesides = 4;

// So many tokens of keys and values go through the caches and push out what was prefetched before.
constexpr int32_t kDeepContext = 4096;

constexpr int64_t kHeadsPerTask = 64;  // that a task norms
constexpr int64_t kNormedPerTask = 4;  // rows

TopK::SoftmaxOver softmax_over(Route::Weighting weighting) {
  return weighting == Route::Weighting::kSoftmaxAll ? TopK::SoftmaxOver::kAll : TopK::SoftmaxOver::kChosen;
}

GateUp::Activation activation_of(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return GateUp::Activation::kSilu;
    case Activation::kClampedSwiglu:
      return GateUp::Activation::kClampedSwiglu;
    case Activation::kGelu:
      return GateUp::Activation::kGelu;
    case Activation::kGeluTanh:
      break;
  }
  return GateUp::Activation::kGeluTanh;
}

// Without a gate, `up` is in its place.
GateUp gate_up_of(const Linear& gate, const Linear& up, Activation activation) {
  if (gate.weight == nullptr) return {linear_of(up), {}, activation_of(activation)};
  return {linear_of(gate), linear_of(up), activation_of(activation)};
}

NormWeights weights_of(const Norm& op) {
  const auto kind = !op.present()                   ? NormWeights::Kind::kNone
                    : op.kind == Norm::Kind::kLayer ? NormWeights::Kind::kLayer
                                                    : NormWeights::Kind::kRms;
  return {values_of(op.weight), op.eps, values_of(op.bias), kind};
}

}  // namespace

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool)
    : spec_(spec),
      kernels_(kernels),
      pool_(pool),
      memory_(workspace_bytes(spec, pool.size(), kernels.quantize_bf16_tile != nullptr), "workspace"),
      prefetch_order_(kProductsPerLayer * spec.layers.size() + kProductsBesides) {
  Arena arena(memory_.data());
  work_ = std::make_unique<Workspace>(spec, pool.size(), kernels.quantize_bf16_tile != nullptr, arena);
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    // A vector behind the last value may be loaded past it: one more cache line.
    const size_t blocks = static_cast<size_t>(spec.kv_groups[g].num_blocks);
    kv_pools_.emplace_back(spec.kv_block_bytes(static_cast<int>(g)) * blocks + 64, "KV cache");
  }
  greedy_.resize(static_cast<size_t>(spec.max_logit_rows));
  kept_rows_.resize(static_cast<size_t>(spec.max_logit_rows));
  std::iota(kept_rows_.begin(), kept_rows_.end(), 0);
  if (spec.adapter_rank == 0) return;
  const size_t most = static_cast<size_t>(std::max(spec.max_tokens, spec.max_logit_rows));
  row_adapters_.reserve(most);
  logit_adapters_.reserve(most);
  for (std::vector<LowRankRun>& runs : runs_) runs.reserve(most);
}

// ---------------------------------------------------------------- the step

void CpuExecutor::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.tokens.size() <= static_cast<size_t>(spec_.max_tokens));
  MILLRACE_CHECK(batch.logit_rows.size() <= static_cast<size_t>(spec_.max_logit_rows));
  batch_ = batch;
  rows_ = static_cast<int64_t>(batch.tokens.size());
  rotation_of_ = nullptr;
  normed_formats_ = {};
  size_t sequences = 0;
  for (const SequenceSlice& slice : batch.sequences) {
    if (slice.num_tokens == 0) continue;
    MILLRACE_CHECK(sequences < batch.tokens.size());
    work_->sequences[sequences] = {slice.first_row, slice.num_tokens, slice.context_len};
    for (size_t g = 0; g < kv_pools_.size(); ++g) work_->tables[g][sequences] = slice.tables[g];
    ++sequences;
  }
  work_->attention_plan.begin_step({work_->sequences, sequences});
  MILLRACE_CHECK(work_->attention_plan.rows() == rows_);
  note_adapters(batch);
  deep_ = work_->attention_plan.longest_context() > kDeepContext;
  prefetch_order_.begin_step(pool_, rows_ <= kSmallBatchRows);
}

// ---------------------------------------------------------------- adapters

void CpuExecutor::note_adapters(const Batch& batch) {
  row_adapters_.clear();
  logit_adapters_.clear();
  if (batch.adapters == nullptr) return;
  const auto has_one = [](const SequenceSlice& slice) { return slice.adapter >= 0 && slice.num_tokens > 0; };
  if (std::none_of(batch.sequences.begin(), batch.sequences.end(), has_one)) return;
  for (const SequenceSlice& slice : batch.sequences) {
    row_adapters_.insert(row_adapters_.end(), static_cast<size_t>(slice.num_tokens), slice.adapter);
  }
  for (const int32_t row : batch.logit_rows)
    logit_adapters_.push_back(row_adapters_[static_cast<size_t>(row)]);
}

bool CpuExecutor::any_update(const Linear& op) const {
  int32_t before = -1;
  for (const int32_t adapter : row_adapters_) {
    if (adapter != before && batch_.adapters->find(adapter, op.weight) != nullptr) return true;
    before = adapter;
  }
  return false;
}

// What rows with these adapters add to their products with op.weight, of x [rows][in]. `place`: of up to
// three products whose updates are needed at once.
CpuExecutor::Updates CpuExecutor::updates_of(const Linear& op, int place, std::span<const int32_t> adapters,
                                             const float* x, int64_t stride) {
  std::vector<LowRankRun>& runs = runs_[place];
  runs.clear();
  float* inner = work_->low_rank[place];
  for (size_t row = 0; row < adapters.size();) {
    size_t end = row + 1;
    while (end < adapters.size() && adapters[end] == adapters[row]) ++end;
    if (const LowRank* update = batch_.adapters->find(adapters[row], op.weight)) {
      MILLRACE_CHECK(update->a->rows <= spec_.adapter_rank);
      const auto count = static_cast<int64_t>(end - row);
      runs.push_back(
          {static_cast<int64_t>(row), count, &own(*update->a).matrix, &own(*update->b).matrix, inner});
      inner += count * update->a->rows;
    }
    row = end;
  }
  low_rank_inner(context(), runs, x, stride);
  return runs;
}

// ---------------------------------------------------------------- calibration

void CpuExecutor::watch(std::initializer_list<const Linear*> products, const float* x, int64_t rows,
                        int64_t stride) {
  if (watcher_ == nullptr) return;
  const Weight* weights[3];
  size_t count = 0;
  for (const Linear* product : products) {
    if (product->weight != nullptr) weights[count++] = product->weight;
  }
  watcher_->see({weights, count}, 0, x, rows, stride);
}

// Behind moe_experts: which rows went to whom, and what `down` was multiplied with.
void CpuExecutor::watch_experts(const Experts& op) {
  const ExpertOrder& order = work_->expert_order;
  const Weight* const both[] = {op.gate.weight, op.up.weight};
  const int64_t inner = op.down.weight->cols, k = spec_.experts_per_token;
  std::vector<float> weighed(static_cast<size_t>(spec_.hidden));
  for (int64_t i = 0; i < rows_ * k; ++i) {
    const float* x = work_->normed + i / k * spec_.hidden;
    const float by = op.weigh_input ? work_->chosen_weight[i] : 1.0f;
    for (int64_t c = 0; c < spec_.hidden; ++c) weighed[static_cast<size_t>(c)] = x[c] * by;
    watcher_->see(both, work_->chosen[i], weighed.data(), 1, spec_.hidden);
    const Weight* const down[] = {op.down.weight};
    watcher_->see(down, work_->chosen[i], work_->inner + order.sorted_row[i] * inner, 1, inner);
  }
}

// ---------------------------------------------------------------- the embedding

void CpuExecutor::embed(const Embed& op) {
  embed_rows(context(), own(*op.table).matrix.view, batch_.tokens.data(), rows_, op.scale, work_->residual);
  const auto view_of = [](const Weight* w) { return w == nullptr ? nullptr : &own(*w).matrix.view; };
  if (op.positions != nullptr || op.types != nullptr) {
    add_position_rows(context(), view_of(op.positions), view_of(op.types), work_->attention_plan.positions(),
                      rows_, spec_.hidden, work_->residual, work_->normed);
  }
  norm_residual(op.norm);
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

void CpuExecutor::norm_heads(const Norm& op, int64_t heads, bool whole, float* values) {
  if (!op.present()) return;
  const int64_t cols = whole ? heads * spec_.head_dim : spec_.head_dim;
  norm_rows(context(), {weights_of(op), values, cols, values, cols, whole ? rows_ : rows_ * heads, cols},
            whole ? kNormedPerTask : kHeadsPerTask);
}

// residual += scale * norm_after(x W^T + b + updates)
void CpuExecutor::multiply_add(const Linear& weights, const ActivationRows& x, Updates updates,
                               const Norm& norm_after, float scale) {
  if (!norm_after.present() && scale == 1.0f) {
    gemm_add(context(), {linear_of(weights), work_->residual, spec_.hidden}, x, rows_);
    return low_rank_add(context(), updates, spec_.hidden, work_->residual, spec_.hidden);
  }
  const GemmProduct product{linear_of(weights), work_->normed, spec_.hidden};
  gemm(context(), {&product, 1}, x, rows_);
  low_rank_add(context(), updates, spec_.hidden, work_->normed, spec_.hidden);
  const NormWeights norm = weights_of(norm_after);
  pool_.parallel_for(rows_, kNormedPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = work_->normed + row * spec_.hidden;
      norm_one(kernels_, norm, y, spec_.hidden, y);
      kernels_.scale_add(work_->residual + row * spec_.hidden, 1.0f, y, scale, spec_.hidden);
    }
  });
}

void CpuExecutor::norm_qkv(const NormQkv& op) {
  const ActivationRows x = norm_for(op.norm, {&op.q, &op.k, &op.v});
  const GemmProduct products[] = {{linear_of(op.q), work_->query, op.q.weight->rows},
                                  {linear_of(op.k), work_->key, op.k.weight->rows},
                                  {linear_of(op.v), work_->value, op.v.weight->rows}};
  prefetch_order_.pause_after_next_product(deep_);
  gemm(context(), products, x, rows_);
  watch({&op.q, &op.k, &op.v}, work_->normed, rows_, spec_.hidden);
  const Linear* const linears[] = {&op.q, &op.k, &op.v};
  for (int i = 0; i < 3; ++i) {
    const Updates updates = updates_of(*linears[i], i, row_adapters_, work_->normed, spec_.hidden);
    low_rank_add(context(), updates, products[i].stride, products[i].out, products[i].stride);
  }
  norm_heads(op.q_norm, spec_.heads, op.norm_whole, work_->query);
  norm_heads(op.k_norm, spec_.kv_heads, op.norm_whole, work_->key);
}

void CpuExecutor::project_add(const Projection& op) {
  if (rows_ == 0) return;
  const ActivationFormats formats = formats_for(kernels_, {linear_of(op.linear)}, rows_);
  const ActivationRows x =
      quantize_rows(context(), formats, work_->attention, rows_, work_->query_cols, work_->input);
  watch({&op.linear}, work_->attention, rows_, work_->query_cols);
  const Updates updates = updates_of(op.linear, 0, row_adapters_, work_->attention, work_->query_cols);
  multiply_add(op.linear, x, updates, op.norm_after, op.scale);
}

// act(gate n) * (up n) with what adapters add, as the input of `down`; n: normed.
InnerActivations CpuExecutor::gate_up_rows(const Linear& gate, const Linear& up, const Linear& down,
                                           Activation activation, const ActivationRows& x) {
  InnerActivations inner{work_->inner, work_->inner_quantized,
                         formats_for(kernels_, {linear_of(down)}, rows_)};
  inner.formats.float32 |= watcher_ != nullptr || any_update(down);  // A reads floats
  watch({&gate, &up}, work_->normed, rows_, spec_.hidden);
  GateUp op = gate_up_of(gate, up, activation);
  op.gate_updates =
      updates_of(gate.weight == nullptr ? up : gate, 0, row_adapters_, work_->normed, spec_.hidden);
  if (gate.weight != nullptr) op.up_updates = updates_of(up, 1, row_adapters_, work_->normed, spec_.hidden);
  gate_up(context(), op, x, rows_, inner);
  watch({&down}, inner.values, rows_, up.weight->rows);
  return inner;
}

void CpuExecutor::ffn_add(const Ffn& op) {
  if (rows_ == 0) return;
  const Linear& gate = op.gate.weight != nullptr ? op.gate : op.up;
  const ActivationRows x = norm_for(op.norm, {&gate, &op.up});
  const InnerActivations inner = gate_up_rows(op.gate, op.up, op.down, op.activation, x);
  const int64_t cols = op.up.weight->rows;
  multiply_add(op.down, inner.quantized.rows(inner.values, rows_, cols, inner.formats),
               updates_of(op.down, 2, row_adapters_, inner.values, cols), op.norm_after, op.scale);
}

void CpuExecutor::norm_logits(const Logits& op) {
  const std::span<const int32_t> rows = batch_.logit_rows;
  if (rows.empty()) return;
  const ActivationRows x = norm_for(op.norm, {&op.output}, rows);
  const GemmProduct product{linear_of(op.output), work_->logits, spec_.vocab};
  gemm(context(), {&product, 1}, x, std::ssize(rows));
  watch({&op.output}, work_->normed, std::ssize(rows), spec_.hidden);
  low_rank_add(context(), updates_of(op.output, 0, logit_adapters_, work_->normed, spec_.hidden), spec_.vocab,
               work_->logits, spec_.vocab);
  if (op.scale == 1.0f && op.softcap == 0.0f) return;
  constexpr int64_t kLogitsPerTask = 8192;
  const int64_t all = std::ssize(rows) * spec_.vocab;
  pool_.parallel_for(tasks_for(all, kLogitsPerTask), 1, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kLogitsPerTask, count = std::min(all, end * kLogitsPerTask) - first;
    float* logits = work_->logits + first;
    for (int64_t i = 0; i < count; ++i) logits[i] *= op.scale;
    if (op.softcap > 0.0f) kernels_.softcap(logits, op.softcap, count, logits);
  });
}

std::span<const float> CpuExecutor::logits() {
  return {work_->logits, batch_.logit_rows.size() * static_cast<size_t>(spec_.vocab)};
}

std::span<const int32_t> CpuExecutor::greedy_tokens() {
  argmax_rows(context(), work_->logits, std::ssize(batch_.logit_rows), spec_.vocab, work_->argmax,
              greedy_.data());
  return {greedy_.data(), batch_.logit_rows.size()};
}

void CpuExecutor::read_hidden(const Norm& norm, int32_t row, std::span<float> to) {
  MILLRACE_CHECK(row >= 0 && row < rows_ && std::ssize(to) == spec_.hidden);
  norm_one(kernels_, weights_of(norm), work_->residual + row * int64_t{spec_.hidden}, spec_.hidden,
           to.data());
}

// ---------------------------------------------------------------- attention

// A block of a group lies as [layer][key, value][kv_head].
PagedKv CpuExecutor::kv_of(int layer) const {
  const auto [group, index] = spec_.layers[layer];
  PagedKv kv;
  kv.type = spec_.kv_type;
  kv.pool = kv_pools_[group].data();
  kv.num_blocks = spec_.kv_groups[group].num_blocks;
  kv.block_bytes = static_cast<int64_t>(spec_.kv_block_bytes(group));
  kv.head_bytes = kBlockTokens * static_cast<int64_t>(kv_head_bytes(spec_.kv_type, spec_.head_dim));
  kv.key_offset = static_cast<int64_t>(index) * 2 * spec_.kv_heads * kv.head_bytes;
  kv.value_offset = kv.key_offset + spec_.kv_heads * kv.head_bytes;
  kv.tables = work_->tables[group];
  return kv;
}

// Cosines and sines of this step's positions; layers that share inv_freq share them.
void CpuExecutor::prepare_rotation(const Rope& op) {
  const auto half = static_cast<int64_t>(op.inv_freq.size());
  MILLRACE_CHECK(2 * half <= spec_.head_dim);
  if (rotation_of_ == op.inv_freq.data() && rotation_magnitude_ == op.magnitude && rotation_size_ == half)
    return;
  rotary_angles(context(), {op.inv_freq, op.magnitude, op.interleaved}, work_->attention_plan.positions(),
                rows_, work_->cosines, work_->sines);
  rotation_of_ = op.inv_freq.data();
  rotation_magnitude_ = op.magnitude;
  rotation_size_ = half;
}

// By the position of each row of the step; nullptr where queries do not grow.
const float* CpuExecutor::query_scales(const Rope::Growth& growth) {
  if (growth.scale == 0.0f) return nullptr;
  for (int64_t row = 0; row < rows_; ++row) {
    const double position = work_->attention_plan.positions()[row] + growth.offset;
    const double grown = 1.0 + growth.scale * std::log1p(std::floor(position / growth.every));
    work_->query_scale[row] = static_cast<float>(grown);
  }
  return work_->query_scale;
}

void CpuExecutor::rope_append_kv(const Rope& op) {
  prepare_rotation(op);
  RopeAppendKv append;
  append.rows = rows_;
  append.heads = spec_.heads;
  append.kv_heads = spec_.kv_heads;
  append.head_dim = spec_.head_dim;
  append.positions = work_->attention_plan.positions();
  append.sequence_of = work_->attention_plan.sequence_of();
  append.cosines = work_->cosines;
  append.sines = work_->sines;
  append.half = rotation_size_;
  append.interleaved = op.interleaved;
  append.query_scale = query_scales(op.growth);
  append.query = work_->query;
  append.key = work_->key;
  append.value = work_->value;
  append.query_blocks = spec_.kv_type == DType::kQ8_0 ? work_->input.blocks : nullptr;
  append.kv = kv_of(op.layer);
  cpu::rope_append_kv(context(), append);
}

// Behind the keys and values of the last layer rows without logits are of no use, if nobody reads hidden
// states: 3% of a prompt of gpt-oss.
bool CpuExecutor::leaves_rows_out(int layer) const {
  return batch_.only_logits && layer + 1 == std::ssize(spec_.layers) && std::ssize(batch_.logit_rows) < rows_;
}

// They become the rows of the step. They ascend: none is overwritten before it is copied.
void CpuExecutor::keep_logit_rows() {
  const auto keep = [](float* values, int64_t cols, int64_t from, int64_t to) {
    if (from != to) std::copy_n(values + from * cols, cols, values + to * cols);
  };
  rows_ = std::ssize(batch_.logit_rows);
  for (int64_t i = 0; i < rows_; ++i) {
    keep(work_->residual, spec_.hidden, batch_.logit_rows[i], i);
    keep(work_->attention, work_->query_cols, batch_.logit_rows[i], i);
  }
  batch_.logit_rows = {kept_rows_.data(), static_cast<size_t>(rows_)};
  row_adapters_ = logit_adapters_;
}

void CpuExecutor::attend(const Attend& op) {
  const bool leaves_out = leaves_rows_out(op.layer);
  if (leaves_out) work_->attention_plan.keep_rows(batch_.logit_rows);
  if (deep_) prefetch_order_.resume(pool_);
  paged_attention(context(), work_->attention_plan,
                  {work_->query,
                   work_->input.blocks,
                   work_->attention,
                   kv_of(op.layer),
                   {op.window, op.chunk, op.bidirectional},
                   op.scale,
                   values_of(op.sinks),
                   op.softcap});
  if (leaves_out) keep_logit_rows();
}

// ---------------------------------------------------------------- experts

void CpuExecutor::route(const Route& op) {
  MILLRACE_CHECK(op.router.weight->rows == spec_.experts && op.experts_per_token == spec_.experts_per_token);
  if (rows_ == 0) return;
  if (op.weighting == Route::Weighting::kSigmoid || op.weighting == Route::Weighting::kSigmoidRenormalized) {
    const ActivationRows x = norm_for(op.norm, {&op.router});
    const GemmProduct product{linear_of(op.router), work_->router_scores, spec_.experts};
    gemm(context(), {&product, 1}, x, rows_);
    route_sigmoid_rows(context(),
                       {spec_.experts, spec_.experts_per_token, values_of(op.choice_bias), op.groups,
                        op.groups_chosen, op.weighting == Route::Weighting::kSigmoidRenormalized,
                        work_->router_scores, work_->chosen, work_->chosen_weight},
                       rows_);
    return scale_routing(op.scale);
  }
  normed_formats_ =
      route_tokens(context(), {norm_of(op.norm),
                               linear_of(op.router),
                               work_->router_scores,
                               {spec_.experts, spec_.experts_per_token, softmax_over(op.weighting),
                                work_->router_scores, work_->chosen, work_->chosen_weight},
                               work_->input});
  scale_routing(op.scale);
}

void CpuExecutor::scale_routing(float scale) {
  if (scale == 1.0f) return;
  for (int64_t i = 0; i < rows_ * spec_.experts_per_token; ++i) work_->chosen_weight[i] *= scale;
}

// residual += sigmoid(mix n) * down(act(gate n) * (up n)): of n what route() left in `normed`.
void CpuExecutor::shared_expert_add(const Experts& op) {
  const Experts::Shared& shared = op.shared;
  ActivationFormats formats = formats_for(kernels_, {linear_of(shared.gate), linear_of(shared.up)}, rows_);
  if (shared.mix.weight != nullptr) formats |= formats_for(kernels_, {linear_of(shared.mix)}, rows_);
  const ActivationRows x =
      quantize_rows(context(), formats, work_->normed, rows_, spec_.hidden, work_->input);
  normed_formats_ = {};  // what route() quantized may have been overwritten
  const InnerActivations inner = gate_up_rows(shared.gate, shared.up, shared.down, op.activation, x);
  const int64_t cols = shared.up.weight->rows;
  const ActivationRows inner_rows = inner.quantized.rows(inner.values, rows_, cols, inner.formats);
  const Updates updates = updates_of(shared.down, 2, row_adapters_, inner.values, cols);
  if (shared.mix.weight == nullptr) return multiply_add(shared.down, inner_rows, updates, {}, 1.0f);
  // Behind the choice of experts their scores are of no use any more.
  float *mix = work_->router_scores, *out = work_->expert_out;
  const GemmProduct mixed{linear_of(shared.mix), mix, 1}, down{linear_of(shared.down), out, spec_.hidden};
  gemm(context(), {&mixed, 1}, x, rows_);
  gemm(context(), {&down, 1}, inner_rows, rows_);
  low_rank_add(context(), updates, spec_.hidden, out, spec_.hidden);
  for (int64_t row = 0; row < rows_; ++row) mix[row] = -mix[row];
  kernels_.exp(mix, rows_, mix);
  pool_.parallel_for(rows_, kNormedPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      kernels_.scale_add(work_->residual + row * spec_.hidden, 1.0f, out + row * spec_.hidden,
                         1.0f / (1.0f + mix[row]), spec_.hidden);
    }
  });
}

void CpuExecutor::experts_add(const Experts& op) {
  if (rows_ == 0) return;
  if (op.shared.up.weight != nullptr) shared_expert_add(op);
  MoeWorkspace moe{work_->expert_order,    work_->input,      work_->inner,
                   work_->inner_quantized, work_->expert_out, work_->row_scale};
  GateUp gate_up = gate_up_of(op.gate, op.up, op.activation);
  gate_up.alpha = op.alpha;
  gate_up.limit = op.limit;
  moe_experts(context(),
              {gate_up, linear_of(op.down), spec_.experts_per_token, work_->chosen, work_->chosen_weight,
               work_->normed, normed_formats_, work_->residual, rows_, op.weigh_input, watcher_ != nullptr},
              moe);
  if (watcher_ != nullptr) watch_experts(op);
  normed_formats_ = {};  // tiles of sorted rows may have taken their memory
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
      return {w.value, rows_, w.kv_cols, spec_.max_tokens};
    case Slot::kAttention:
      return {w.attention, rows_, w.query_cols, spec_.max_tokens};
    case Slot::kLogits:
      break;
  }
  return {w.logits, static_cast<int64_t>(batch_.logit_rows.size()), spec_.vocab, spec_.max_logit_rows};
}

std::span<std::byte> CpuExecutor::block_bytes(int group, int32_t block) const {
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
}

void CpuExecutor::copy_block(int group, int32_t from, int32_t to) {
  const std::span<std::byte> source = block_bytes(group, from);
  std::memcpy(block_bytes(group, to).data(), source.data(), source.size());
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
