// Slots, norms and dense products.
#include "backend/cpu/cpu_executor.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "kernels/quant/codec.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kGreedyPiece = 4096;  // logits a task looks through

// Products of a step that are shared out, at most, per layer and besides.
constexpr size_t kSharedPerLayer = 6, kSharedBesides = 4;

// Of what is done to a token at a time: with few of them a token is a task.
int64_t tokens_per_task(int64_t tokens, bool cells) {
  if (tokens <= kFewTokens) return 1;
  return cells ? 8 : 4;
}

const float* values_of(const Weight* vector) {
  return vector == nullptr ? nullptr : own(*vector).values.data();
}

}  // namespace

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool)
    : spec_(spec),
      kernels_(kernels),
      pool_(pool),
      memory_(workspace_bytes(spec, pool.size(), kernels.quantize_bf16_tile != nullptr), "workspace") {
  Arena arena(memory_.data());
  work_ = std::make_unique<Workspace>(spec, pool.size(), kernels.quantize_bf16_tile != nullptr, arena);
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    // A vector behind the last value may be loaded past it: one more cache line.
    const size_t blocks = static_cast<size_t>(spec.kv_groups[g].num_blocks);
    kv_pools_.emplace_back(spec.kv_block_bytes(static_cast<int>(g)) * blocks + 64, "KV cache");
  }
  order_.reserve(kSharedPerLayer * spec.layers.size() + kSharedBesides);
  greedy_.reserve(static_cast<size_t>(spec.max_logit_rows));
  kept_.resize(static_cast<size_t>(spec.max_logit_rows));
  std::iota(kept_.begin(), kept_.end(), 0);
  largest_.resize(static_cast<size_t>(spec.max_logit_rows * tasks_for(spec.vocab, kGreedyPiece)));
}

void CpuExecutor::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.tokens.size() <= static_cast<size_t>(spec_.max_tokens));
  MILLRACE_CHECK(batch.logit_rows.size() <= static_cast<size_t>(spec_.max_logit_rows));
  batch_ = batch;
  rows_ = static_cast<int64_t>(batch.tokens.size());
  rotation_of_ = nullptr;
  normed_forms_ = {};
  plan_attention();
  at_ = 0;
  few_ = rows_ <= kFewTokens;
  if (!few_) pool_.expect({});
}

Soon CpuExecutor::soon_of(std::initializer_list<const CpuWeight*> weights, int64_t rows) {
  Soon soon;
  for (const CpuWeight* w : weights) {
    soon.data[soon.count++] = reinterpret_cast<const std::byte*>(w->matrix.data);
    soon.stride = soon.bytes = rows * w->matrix.row_bytes;
  }
  return soon;
}

// A product begins that reads `mine` first. Whoever waits from now on asks for what the one after it does.
// The few rows that a long step keeps in its last layer are no such step.
void CpuExecutor::announce(const Soon& mine, const Soon* next) {
  if (!few_) return;
  if (at_ == order_.size() && order_.size() < order_.capacity()) order_.emplace_back();
  if (at_ < order_.size()) order_[at_++] = mine;
  if (std::exchange(wait_for_attention_, false)) {
    pool_.expect({});
    return;
  }
  pool_.expect(next != nullptr ? *next : order_[at_ < order_.size() ? at_ : 0]);
}

void CpuExecutor::embed(const Weight& table, float scale) {
  pool_.parallel_for(rows_, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* x = work_->residual + t * spec_.hidden;
      MILLRACE_CHECK(batch_.tokens[t] >= 0 && batch_.tokens[t] < table.rows);
      quant::dequantize_row(own(table).view, batch_.tokens[t], x);
      if (scale != 1.0f) {
        for (int64_t i = 0; i < spec_.hidden; ++i) x[i] *= scale;
      }
    }
  });
}

CpuExecutor::Forms CpuExecutor::forms_for(std::initializer_list<const Linear*> ops, int64_t rows,
                                          bool indexed) const {
  Forms forms;
  for (const Linear* op : ops) {
    const ActivationFormat form = kernels_.activations(own(*op->weight).format, rows, indexed);
    forms.blocks |= form == ActivationFormat::kInt8Blocks;
    forms.cells |= form == ActivationFormat::kInt8Tiles;
    forms.binary |= form == ActivationFormat::kPow2Blocks;
    forms.tiles |= form == ActivationFormat::kBf16Tiles;
    forms.values |= form == ActivationFormat::kFloat32;
  }
  return forms;
}

// Columns [first, first + count) of row `row` of `rows`, in the forms that were asked for.
void CpuExecutor::make_forms(Forms forms, const float* x, int64_t first, int64_t count, int64_t row,
                             int64_t rows, int64_t cols, const Formed& to) const {
  const int64_t at = (row * cols + first) / kQuantBlock;
  if (forms.blocks) kernels_.quantize_int8(x, count, to.blocks + at);
  if (forms.binary) kernels_.quantize_pow2(x, count, to.binary + at);
  if (forms.cells) {
    const int64_t group = row / kTileHeight * kTileHeight;
    kernels_.quantize_int8_tile(x, count, to.cells() + (group / kTileHeight * cols + first) / kQuantBlock,
                                row - group, std::min(kTileHeight, rows - group));
  }
  if (forms.tiles) {
    const Bf16TileRow place = bf16_tile_row(to.tiles, rows, cols, row, first / kQuantBlock);
    kernels_.quantize_bf16_tile(x, count, place.at, place.height);
  }
}

// normed[i] = norm(residual[rows[i]]), or of every row when `rows` is empty; and in the forms that products
// want.
void CpuExecutor::norm_rows(const Norm& op, std::span<const int32_t> rows, Forms forms) {
  const int64_t count = rows.empty() ? rows_ : static_cast<int64_t>(rows.size());
  pool_.parallel_for(count, tokens_per_task(count, forms.cells), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) norm_row(op, rows.empty() ? i : rows[i], i, count, forms);
  });
  normed_forms_ = forms;
}

// normed[to] of `count` rows = norm(residual[row]), and its forms.
void CpuExecutor::norm_row(const Norm& op, int64_t row, int64_t to, int64_t count, Forms forms) const {
  float* y = work_->normed + to * spec_.hidden;
  kernels_.rms_norm(work_->residual + row * spec_.hidden, values_of(op.weight), op.eps, spec_.hidden, y);
  make_forms(forms, y, 0, spec_.hidden, to, count, spec_.hidden, input());
}

// `values` [rows][cols] with their other forms, made here when wanted.
Rows CpuExecutor::formed(const float* values, int64_t rows, int64_t cols, Forms forms) {
  if (forms.blocks || forms.cells || forms.binary || forms.tiles) {
    pool_.parallel_for(rows, tokens_per_task(rows, forms.cells), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        make_forms(forms, values + i * cols, 0, cols, i, rows, cols, input());
      }
    });
  }
  return input().rows(values, rows, cols, forms);
}

// Rows [first, first + count) of a product with rows [m, m + num_m) of x.
void CpuExecutor::multiply_part(const Product& product, int64_t first, int64_t count, const Rows& x,
                                int64_t m, int64_t num_m, int thread, const PrefetchHint& chain) {
  const CpuWeight& w = own(*product.op->weight);
  const float* bias = values_of(product.op->bias);
  float* out = product.out + m * w.rows + first;
  multiply(kernels_, w, 0, first, count, x.from(m), num_m, out, w.rows, work_->threads[thread].decoded,
           chain);
  for (int64_t i = 0; bias != nullptr && i < num_m; ++i) {
    kernels_.scale_add(out + i * w.rows, 1.0f, bias + first, 1.0f, count);  // their sum
  }
}

void CpuExecutor::multiply_few(std::span<const Product> products, int64_t total, const Rows& x,
                               int64_t rows) {
  const ShrinkingParts parts = plain_parts(total);
  announce(soon_of({&own(*products[0].op->weight)}, parts.first_rows()));
  const auto chain_at = [&](int64_t row, bool asked) -> PrefetchHint {
    if (row < 0) return {nullptr, 0, asked};
    const Product* p = products.data();
    for (; row >= p->op->weight->rows; ++p) row -= p->op->weight->rows;
    return chain_to(own(*p->op->weight), 0, row, asked);
  };
  share_rows(parts, [&](const RowPart& part, int thread) {
    int64_t first = part.first, count = part.count, done = 0;
    for (const Product* p = products.data(); count > 0; first -= p->op->weight->rows, ++p) {
      const int64_t some = std::min(count, p->op->weight->rows - first);
      if (some <= 0) continue;
      count -= some;
      multiply_part(*p, first, some, x, 0, rows, thread,
                    chain_at(count > 0 ? part.first + done + some : part.next, part.asked || done > 0));
      first += some;
      done += some;
    }
  });
}

void CpuExecutor::multiply_all(std::span<const Product> products, const Rows& x, int64_t rows) {
  if (pool_.nodes() > 1 && products.size() > 1) {
    // A loop each: only so has every memory node the same part of every matrix.
    for (const Product& product : products) multiply_all({&product, 1}, x, rows);
    return;
  }
  int64_t total = 0;
  for (const Product& p : products) total += p.op->weight->rows;
  if (rows <= kFewTokens && total >= int64_t{64} * pool_.size() && pool_.nodes() == 1) {
    multiply_few(products, total, x, rows);
    return;
  }
  // A matrix of few rows (a router) with many tokens is shared out by tokens: no thread reads them all.
  const bool by_tokens = total <= kMaxRowsPerTask && rows >= int64_t{16} * pool_.size();
  const int64_t per_task = by_tokens ? kMaxRowsPerTask : plain_rows_per_task(total, pool_.size());
  // Cells of kMaxRowsPerPass tokens stay in a thread's second-level cache while it goes through the weights.
  const int64_t step = by_tokens            ? (x.tiles != nullptr ? x.height : kTileHeight)
                       : x.cells != nullptr ? kMaxRowsPerPass
                                            : rows;
  int64_t tasks = 0;
  for (const Product& p : products) tasks += tasks_for(p.op->weight->rows, per_task);
  const int64_t all = tasks * tasks_for(rows, step);
  const auto run = [&](int64_t task, int thread) {
    const Product* p = products.data();
    int64_t at = task % tasks;
    for (; at >= tasks_for(p->op->weight->rows, per_task); ++p)
      at -= tasks_for(p->op->weight->rows, per_task);
    const int64_t first = at * per_task, m = task / tasks * step;
    multiply_part(*p, first, std::min(per_task, p->op->weight->rows - first), x, m, std::min(step, rows - m),
                  thread);
  };
  if (rows <= kFewTokens && pool_.nodes() == 1) {
    announce(products.size() == 1 ? soon_of({&own(*products[0].op->weight)}, per_task) : Soon{});
    pool_.parallel_parts(all, [&](const LoopPart& part, int thread) { run(part.index, thread); });
    return;
  }
  pool_.parallel_for(all, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) run(task, thread);
  });
}

// Columns [first, first + count) of rows [m, m + num_m) of y [rows_][w.rows] += x W^T + b.
void CpuExecutor::multiply_add_part(const Linear& op, int64_t first, int64_t count, const Rows& x, int64_t m,
                                    int64_t num_m, float* y, int thread, const PrefetchHint& chain) {
  const CpuWeight& w = own(*op.weight);
  const float* bias = values_of(op.bias);
  float* tile = work_->threads[thread].tile;
  for (const int64_t end = m + num_m; m < end; m += kMaxRowsPerPass) {
    const int64_t rows = std::min(kMaxRowsPerPass, end - m);
    multiply(kernels_, w, 0, first, count, x.from(m), rows, tile, count, work_->threads[thread].decoded,
             chain);
    for (int64_t i = 0; i < rows; ++i) {
      float* to = y + (m + i) * w.rows + first;
      const float* from = tile + i * count;
      for (int64_t r = 0; r < count; ++r) to[r] += from[r] + (bias == nullptr ? 0.0f : bias[first + r]);
    }
  }
}

// y += x W^T + b
void CpuExecutor::multiply_add(const Linear& op, const Rows& x, float* y) {
  const int64_t rows = op.weight->rows;
  if (rows_ <= kFewTokens && rows >= int64_t{64} * pool_.size() && pool_.nodes() == 1) {
    const CpuWeight& w = own(*op.weight);
    const ShrinkingParts parts = plain_parts(rows);
    announce(soon_of({&w}, parts.first_rows()));
    share_rows(parts, [&](const RowPart& part, int thread) {
      in_bufferfuls(part, [&](int64_t first, int64_t count, int64_t next, bool asked) {
        const PrefetchHint chain = next < 0 ? PrefetchHint{nullptr, 0, asked} : chain_to(w, 0, next, asked);
        multiply_add_part(op, first, count, x, 0, rows_, y, thread, chain);
      });
    });
    return;
  }
  const int64_t per_task = plain_rows_per_task(rows, pool_.size()), tasks = tasks_for(rows, per_task);
  const int64_t step = x.cells != nullptr ? kMaxRowsPerPass : rows_;
  pool_.parallel_for(tasks * tasks_for(rows_, step), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % tasks * per_task, m = task / tasks * step;
      multiply_add_part(op, first, std::min(per_task, rows - first), x, m, std::min(step, rows_ - m), y,
                        thread);
    }
  });
}

void CpuExecutor::norm_heads(const Norm& op, int64_t heads, float* values) {
  if (op.weight == nullptr) return;
  const float* weight = values_of(op.weight);
  pool_.parallel_for(rows_ * heads, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      float* x = values + i * spec_.head_dim;
      kernels_.rms_norm(x, weight, op.eps, spec_.head_dim, x);
    }
  });
}

void CpuExecutor::norm_qkv(const NormQkv& op) {
  norm_rows(op.norm, {}, forms_for({&op.q, &op.k, &op.v}, rows_));
  const Product products[] = {{&op.q, work_->query}, {&op.k, work_->key}, {&op.v, work_->value}};
  wait_for_attention_ = deep_;
  multiply_all(products, normed(rows_), rows_);
  norm_heads(op.q_norm, spec_.heads, work_->query);
  norm_heads(op.k_norm, spec_.kv_heads, work_->key);
}

void CpuExecutor::project_add(const Linear& op) {
  if (rows_ == 0) return;
  multiply_add(op, formed(work_->attention, rows_, work_->query_cols, forms_for({&op}, rows_)),
               work_->residual);
}

void CpuExecutor::gate_up(const GateUp& op, int64_t expert, int64_t first, int64_t count, const Rows& x,
                          int64_t num_m, const Inner& inner, int thread, const PrefetchHint& chain) {
  const CpuWeight &gate = own(*op.gate->weight), &up = own(*op.up->weight);
  const float *gate_bias = values_of(op.gate->bias), *up_bias = values_of(op.up->bias);
  float* g = work_->threads[thread].tile;
  float* u = g + kMaxRowsPerPass * kMaxRowsPerTask;
  float* decoded = work_->threads[thread].decoded;
  const int64_t offset = expert * gate.rows + first;  // into biases [experts][rows]
  const float* y_of[kTileHeight];
  for (int64_t m = 0; m < num_m; m += kMaxRowsPerPass) {
    const int64_t rows = std::min(kMaxRowsPerPass, num_m - m);
    multiply(kernels_, gate, expert, first, count, x.from(m), rows, g, count, decoded,
             chain_to(up, expert, first, chain.done));
    multiply(kernels_, up, expert, first, count, x.from(m), rows, u, count, decoded,
             {chain.next, chain.bytes, true});
    for (int64_t i = 0; i < rows; ++i) {
      float *gi = g + i * count, *ui = u + i * count;
      float* y = inner.forms.values ? inner.values + (m + i) * gate.rows + first : gi;
      // Times one and one: plain sums, by the table's vectors.
      if (gate_bias != nullptr) kernels_.scale_add(gi, 1.0f, gate_bias + offset, 1.0f, count);
      if (up_bias != nullptr) kernels_.scale_add(ui, 1.0f, up_bias + offset, 1.0f, count);
      if (op.activation != nullptr && op.activation->activation == Experts::Activation::kClampedSwiglu) {
        kernels_.clamped_swiglu(gi, ui, op.activation->alpha, op.activation->limit, count, y);
      } else {
        kernels_.silu_mul(gi, ui, count, y);
      }
      Forms forms = inner.forms;
      if (forms.tiles) {  // a group is made at its last row
        forms.tiles = false;
        const Bf16TileRow to =
            bf16_tile_row(inner.formed.tiles, num_m, gate.rows, m + i, first / kQuantBlock);
        const int64_t at = m + i - to.group;
        y_of[at] = y;
        if (at == to.height - 1) {
          kernels_.quantize_bf16_tile_group(y_of, to.height, count, to.at - at * kQuantBlock);
        }
      }
      make_forms(forms, y, first, count, m + i, num_m, gate.rows, inner.formed);
    }
  }
}

void CpuExecutor::ffn_add(const Ffn& op) {
  if (rows_ == 0) return;
  norm_rows(op.norm, {}, forms_for({&op.gate, &op.up}, rows_));
  const int64_t inner_cols = op.gate.weight->rows, per_task = rows_per_task(2 * inner_cols, pool_.size());
  const Inner inner{work_->inner,
                    {work_->inner_blocks, work_->inner_binary, work_->inner_tiles},
                    forms_for({&op.down}, rows_)};
  const GateUp both{&op.gate, &op.up, nullptr};
  if (rows_ <= kFewTokens && pool_.nodes() == 1) {
    const CpuWeight& gate = own(*op.gate.weight);
    const ShrinkingParts parts(inner_cols, kQuantBlock, pool_.size());
    announce(soon_of({&gate, &own(*op.up.weight)}, parts.first_rows()));
    share_rows(parts, [&](const RowPart& part, int thread) {
      in_bufferfuls(part, [&](int64_t first, int64_t count, int64_t next, bool asked) {
        const PrefetchHint chain =
            next < 0 ? PrefetchHint{nullptr, 0, asked} : chain_to(gate, 0, next, asked);
        gate_up(both, 0, first, count, normed(rows_), rows_, inner, thread, chain);
      });
    });
  } else {
    pool_.parallel_for(tasks_for(inner_cols, per_task), 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task * per_task, count = std::min(per_task, inner_cols - first);
        gate_up(both, 0, first, count, normed(rows_), rows_, inner, thread);
      }
    });
  }
  multiply_add(op.down, inner.formed.rows(inner.values, rows_, inner_cols, inner.forms), work_->residual);
}

void CpuExecutor::norm_logits(const Logits& op) {
  const auto rows = static_cast<int64_t>(batch_.logit_rows.size());
  if (rows == 0) return;
  norm_rows(op.norm, batch_.logit_rows, forms_for({&op.output}, rows));
  const Product product{&op.output, work_->logits};
  multiply_all({&product, 1}, normed(rows), rows);
}

std::span<const float> CpuExecutor::logits() {
  return {work_->logits, batch_.logit_rows.size() * static_cast<size_t>(spec_.vocab)};
}

std::span<const int32_t> CpuExecutor::greedy_tokens() {
  const auto rows = static_cast<int64_t>(batch_.logit_rows.size());
  const int64_t vocab = spec_.vocab, pieces = tasks_for(vocab, kGreedyPiece);
  pool_.parallel_for(rows * pieces, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % pieces * kGreedyPiece, last = std::min(first + kGreedyPiece, vocab);
      const float* logits = work_->logits + task / pieces * vocab;
      Largest found{logits[first], static_cast<int32_t>(first)};
      bool nan = false;
      for (int64_t i = first; i < last; ++i) {
        nan |= std::isnan(logits[i]);
        if (logits[i] > found.value) found = {logits[i], static_cast<int32_t>(i)};
      }
      largest_[static_cast<size_t>(task)] = {found.value, nan ? -1 : found.token};
    }
  });
  greedy_.clear();
  for (int64_t row = 0; row < rows; ++row) {
    const Largest* piece = largest_.data() + row * pieces;
    Largest found = piece[0];
    for (int64_t i = 1; i < pieces && found.token >= 0; ++i) {
      if (piece[i].token < 0 || piece[i].value > found.value) found = piece[i];
    }
    greedy_.push_back(found.token);
  }
  return greedy_;
}

void CpuExecutor::read_hidden(const Norm& norm, int32_t row, std::span<float> to) {
  MILLRACE_CHECK(row >= 0 && row < rows_ && std::ssize(to) == spec_.hidden);
  kernels_.rms_norm(work_->residual + row * int64_t{spec_.hidden}, values_of(norm.weight), norm.eps,
                    spec_.hidden, to.data());
}

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
