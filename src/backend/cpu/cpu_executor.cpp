// Slots, norms and dense products.
#include "backend/cpu/cpu_executor.h"

#include <cstring>

#include "base/check.h"
#include "quant/codec.h"

namespace millrace::cpu {
namespace {

const float* values_of(const Weight* vector) {
  return vector == nullptr ? nullptr : own(*vector).values.data();
}

bool wants_blocks(const Linear& op) { return own(*op.weight).int8_activations(); }

}  // namespace

CpuExecutor::CpuExecutor(const ExecutorSpec& spec, const KernelTable& kernels, ThreadPool& pool)
    : spec_(spec), kernels_(kernels), pool_(pool), memory_(workspace_bytes(spec, pool.size()), "workspace") {
  Arena arena(memory_.data());
  work_ = std::make_unique<Workspace>(spec, pool.size(), arena);
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    // A vector behind the last value may be loaded past it: one more cache line.
    const size_t blocks = static_cast<size_t>(spec.kv_groups[g].num_blocks);
    kv_pools_.emplace_back(spec.kv_block_bytes(static_cast<int>(g)) * blocks + 64, "KV cache");
  }
}

void CpuExecutor::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.tokens.size() <= static_cast<size_t>(spec_.max_tokens));
  MILLRACE_CHECK(batch.logit_rows.size() <= static_cast<size_t>(spec_.max_logit_rows));
  batch_ = batch;
  rows_ = static_cast<int64_t>(batch.tokens.size());
  rotation_of_ = nullptr;
  normed_quantized_ = false;
  plan_attention();
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

// normed[i] = norm(residual[rows[i]]), or of every row when `rows` is empty; and quantized where a product
// wants it.
void CpuExecutor::norm_rows(const Norm& op, std::span<const int32_t> rows, bool quantize) {
  const int64_t count = rows.empty() ? rows_ : static_cast<int64_t>(rows.size());
  const float* weight = values_of(op.weight);
  pool_.parallel_for(count, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows.empty() ? i : rows[i];
      float* y = work_->normed + i * spec_.hidden;
      kernels_.rms_norm(work_->residual + row * spec_.hidden, weight, op.eps, spec_.hidden, y);
      if (quantize) kernels_.quantize(y, spec_.hidden, work_->blocks + i * (spec_.hidden / kQuantBlock));
    }
  });
  normed_quantized_ = quantize;
}

// `values` [rows][cols] with their blocks, made here when wanted.
Rows CpuExecutor::quantized(const float* values, int64_t rows, int64_t cols, ActivationBlock* blocks,
                            bool wanted) {
  if (wanted) {
    pool_.parallel_for(rows, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        kernels_.quantize(values + i * cols, cols, blocks + i * (cols / kQuantBlock));
      }
    });
  }
  return {values, blocks, cols, nullptr};
}

void CpuExecutor::multiply_all(std::span<const Product> products, const Rows& x, int64_t rows) {
  if (pool_.nodes() > 1 && products.size() > 1) {
    // A loop each: only so has every memory node the same part of every matrix.
    for (const Product& product : products) multiply_all({&product, 1}, x, rows);
    return;
  }
  int64_t total = 0;
  for (const Product& p : products) total += p.op->weight->rows;
  const int64_t per_task = plain_rows_per_task(total, pool_.size());
  int64_t tasks = 0;
  for (const Product& p : products) tasks += tasks_for(p.op->weight->rows, per_task);
  pool_.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const Product* p = products.data();
      int64_t at = task;
      for (; at >= tasks_for(p->op->weight->rows, per_task); ++p)
        at -= tasks_for(p->op->weight->rows, per_task);
      const CpuWeight& w = own(*p->op->weight);
      const float* bias = values_of(p->op->bias);
      const int64_t first = at * per_task, count = std::min(per_task, w.rows - first);
      float* out = p->out + first;
      multiply(kernels_, w, 0, first, count, x, rows, out, w.rows, work_->threads[thread].decoded);
      for (int64_t i = 0; bias != nullptr && i < rows; ++i) {
        for (int64_t r = 0; r < count; ++r) out[i * w.rows + r] += bias[first + r];
      }
    }
  });
}

// y [rows_][w.rows] += x W^T + b
void CpuExecutor::multiply_add(const Linear& op, const Rows& x, float* y) {
  const CpuWeight& w = own(*op.weight);
  const float* bias = values_of(op.bias);
  const int64_t per_task = plain_rows_per_task(w.rows, pool_.size());
  pool_.parallel_for(tasks_for(w.rows, per_task), 1, [&](int64_t begin, int64_t end, int thread) {
    float* tile = work_->threads[thread].tile;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * per_task, count = std::min(per_task, w.rows - first);
      for (int64_t m = 0; m < rows_; m += kRowsPerPass) {
        const int64_t num_m = std::min(kRowsPerPass, rows_ - m);
        multiply(kernels_, w, 0, first, count, x.from(m), num_m, tile, count, work_->threads[thread].decoded);
        for (int64_t i = 0; i < num_m; ++i) {
          float* to = y + (m + i) * w.rows + first;
          const float* from = tile + i * count;
          for (int64_t r = 0; r < count; ++r) to[r] += from[r] + (bias == nullptr ? 0.0f : bias[first + r]);
        }
      }
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
  norm_rows(op.norm, {}, wants_blocks(op.q) || wants_blocks(op.k) || wants_blocks(op.v));
  const Product products[] = {{&op.q, work_->query}, {&op.k, work_->key}, {&op.v, work_->value}};
  multiply_all(products, {work_->normed, work_->blocks, spec_.hidden, nullptr}, rows_);
  norm_heads(op.q_norm, spec_.heads, work_->query);
  norm_heads(op.k_norm, spec_.kv_heads, work_->key);
}

void CpuExecutor::project_add(const Linear& op) {
  multiply_add(op, quantized(work_->attention, rows_, work_->query_cols, work_->blocks, wants_blocks(op)),
               work_->residual);
}

void CpuExecutor::gate_up(const GateUp& op, int64_t expert, int64_t first, int64_t count, const Rows& x,
                          int64_t num_m, float* inner, ActivationBlock* inner_blocks, int thread) {
  const CpuWeight &gate = own(*op.gate->weight), &up = own(*op.up->weight);
  const float *gate_bias = values_of(op.gate->bias), *up_bias = values_of(op.up->bias);
  float* g = work_->threads[thread].tile;
  float* u = g + kRowsPerPass * kMaxRowsPerTask;
  float* decoded = work_->threads[thread].decoded;
  const int64_t offset = expert * gate.rows + first;  // into biases [experts][rows]
  for (int64_t m = 0; m < num_m; m += kRowsPerPass) {
    const int64_t rows = std::min(kRowsPerPass, num_m - m);
    multiply(kernels_, gate, expert, first, count, x.from(m), rows, g, count, decoded);
    multiply(kernels_, up, expert, first, count, x.from(m), rows, u, count, decoded);
    for (int64_t i = 0; i < rows; ++i) {
      float *gi = g + i * count, *ui = u + i * count, *y = inner + (m + i) * gate.rows + first;
      for (int64_t r = 0; gate_bias != nullptr && r < count; ++r) gi[r] += gate_bias[offset + r];
      for (int64_t r = 0; up_bias != nullptr && r < count; ++r) ui[r] += up_bias[offset + r];
      if (op.activation != nullptr && op.activation->activation == Experts::Activation::kClampedSwiglu) {
        kernels_.clamped_swiglu(gi, ui, op.activation->alpha, op.activation->limit, count, y);
      } else {
        kernels_.silu_mul(gi, ui, count, y);
      }
      if (inner_blocks != nullptr) {
        kernels_.quantize(y, count, inner_blocks + ((m + i) * gate.rows + first) / kQuantBlock);
      }
    }
  }
}

void CpuExecutor::ffn_add(const Ffn& op) {
  norm_rows(op.norm, {}, wants_blocks(op.gate) || wants_blocks(op.up));
  const Rows x{work_->normed, work_->blocks, spec_.hidden, nullptr};
  const int64_t inner_cols = op.gate.weight->rows, per_task = rows_per_task(2 * inner_cols, pool_.size());
  ActivationBlock* inner_blocks = wants_blocks(op.down) ? work_->inner_blocks : nullptr;
  pool_.parallel_for(tasks_for(inner_cols, per_task), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * per_task, count = std::min(per_task, inner_cols - first);
      gate_up({&op.gate, &op.up, nullptr}, 0, first, count, x, rows_, work_->inner, inner_blocks, thread);
    }
  });
  multiply_add(op.down, {work_->inner, inner_blocks, inner_cols, nullptr}, work_->residual);
}

void CpuExecutor::norm_logits(const Logits& op) {
  const auto rows = static_cast<int64_t>(batch_.logit_rows.size());
  if (rows == 0) return;
  norm_rows(op.norm, batch_.logit_rows, wants_blocks(op.output));
  const Product product{&op.output, work_->logits};
  multiply_all({&product, 1}, {work_->normed, work_->blocks, spec_.hidden, nullptr}, rows);
}

std::span<const float> CpuExecutor::logits() {
  return {work_->logits, batch_.logit_rows.size() * static_cast<size_t>(spec_.vocab)};
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
