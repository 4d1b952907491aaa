#include "kernels/cpu/matmul/gemm.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

// Outputs that nobody reads in blocks of 32 are handed out by sixteens.
ShrinkingParts unblocked_parts(const Context& ctx, int64_t rows) {
  return {rows, kRowsAtOnce, ctx.pool.size()};
}

// Small matrices would come to parts of a single unit.
bool small_batch_parts(const Context& ctx, int64_t rows, int64_t weight_rows) {
  return ctx.small_batch(rows) && weight_rows >= int64_t{64} * ctx.pool.size();
}

void small_batch_gemm(const Context& ctx, std::span<const GemmProduct> products, int64_t total,
                      const ActivationRows& x, int64_t rows) {
  const ShrinkingParts parts = unblocked_parts(ctx, total);
  ctx.begin_product(first_reads(*products[0].weights.matrix, parts.first_rows()));
  const auto prefetch_at = [&](int64_t row, bool prefetched) -> PrefetchHint {
    if (row < 0) return {nullptr, 0, prefetched};
    const GemmProduct* p = products.data();
    for (; row >= p->weights.matrix->rows; ++p) row -= p->weights.matrix->rows;
    return prefetch_of(*p->weights.matrix, 0, row, prefetched);
  };
  parallel_rows(ctx.pool, parts, [&](const RowPart& part, int thread) {
    int64_t first = part.first, count = part.count, done = 0;
    for (const GemmProduct* p = products.data(); count > 0; first -= p->weights.matrix->rows, ++p) {
      const int64_t some = std::min(count, p->weights.matrix->rows - first);
      if (some <= 0) continue;
      count -= some;
      gemm_part(ctx, *p, first, some, x, 0, rows, thread,
                prefetch_at(count > 0 ? part.first + done + some : part.next, part.prefetched || done > 0));
      first += some;
      done += some;
    }
  });
}

// gemm_part that adds to the output.
void gemm_add_part(const Context& ctx, const GemmProduct& product, int64_t first, int64_t count,
                   const ActivationRows& x, int64_t m, int64_t num_m, int thread,
                   const PrefetchHint& prefetch = {}) {
  const WeightMatrix& w = *product.weights.matrix;
  const float* bias = product.weights.bias;
  float* tile = ctx.scratch[thread].tile;
  for (const int64_t end = m + num_m; m < end; m += kMaxRowsPerPass) {
    const int64_t rows = std::min(kMaxRowsPerPass, end - m);
    gemm_chunk(ctx.kernels, {w, 0, first, count}, x.from(m), rows, tile, count,
               ctx.scratch[thread].dequantized, prefetch);
    for (int64_t i = 0; i < rows; ++i) {
      float* to = product.out + (m + i) * product.stride + first;
      const float* from = tile + i * count;
      for (int64_t r = 0; r < count; ++r) to[r] += from[r] + (bias == nullptr ? 0.0f : bias[first + r]);
    }
  }
}

}  // namespace

void gemm_part(const Context& ctx, const GemmProduct& product, int64_t first, int64_t count,
               const ActivationRows& x, int64_t m, int64_t num_m, int thread, const PrefetchHint& prefetch) {
  const float* bias = product.weights.bias;
  float* out = product.out + m * product.stride + first;
  gemm_chunk(ctx.kernels, {*product.weights.matrix, 0, first, count}, x.from(m), num_m, out, product.stride,
             ctx.scratch[thread].dequantized, prefetch);
  for (int64_t i = 0; bias != nullptr && i < num_m; ++i) {
    ctx.kernels.scale_add(out + i * product.stride, 1.0f, bias + first, 1.0f, count);  // their sum
  }
}

void gemm(const Context& ctx, std::span<const GemmProduct> products, const ActivationRows& x, int64_t rows) {
  ThreadPool& pool = ctx.pool;
  if (pool.nodes() > 1 && products.size() > 1) {
    // A loop each: only so has every memory node the same part of every matrix.
    for (const GemmProduct& product : products) gemm(ctx, {&product, 1}, x, rows);
    return;
  }
  int64_t total = 0;
  for (const GemmProduct& p : products) total += p.weights.matrix->rows;
  if (small_batch_parts(ctx, rows, total)) {
    small_batch_gemm(ctx, products, total, x, rows);
    return;
  }
  // A matrix of few rows (a router) with many tokens is shared out by tokens: no thread reads them all.
  const bool by_tokens = total <= kMaxRowsPerTask && rows >= int64_t{16} * pool.size();
  const int64_t per_task = by_tokens ? kMaxRowsPerTask : unblocked_rows_per_task(total, pool.size());
  // Int8 tiles of kMaxRowsPerPass tokens stay in a thread's L2 cache while it goes through the weights.
  const int64_t step = by_tokens                 ? (x.bf16_tiles != nullptr ? x.tile_height : kTileHeight)
                       : x.int8_tiles != nullptr ? kMaxRowsPerPass
                                                 : rows;
  int64_t tasks = 0;
  for (const GemmProduct& p : products) tasks += tasks_for(p.weights.matrix->rows, per_task);
  const int64_t all = tasks * tasks_for(rows, step);
  const auto run = [&](int64_t task, int thread) {
    const GemmProduct* p = products.data();
    int64_t at = task % tasks;
    for (; at >= tasks_for(p->weights.matrix->rows, per_task); ++p) {
      at -= tasks_for(p->weights.matrix->rows, per_task);
    }
    const int64_t first = at * per_task, m = task / tasks * step;
    gemm_part(ctx, *p, first, std::min(per_task, p->weights.matrix->rows - first), x, m,
              std::min(step, rows - m), thread);
  };
  if (ctx.small_batch(rows)) {
    ctx.begin_product(products.size() == 1 ? first_reads(*products[0].weights.matrix, per_task)
                                           : FirstReads{});
    pool.parallel_parts(all, [&](const LoopPart& part, int thread) { run(part.index, thread); });
    return;
  }
  pool.parallel_for(all, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) run(task, thread);
  });
}

void gemm_add(const Context& ctx, const GemmProduct& product, const ActivationRows& x, int64_t rows) {
  const WeightMatrix& w = *product.weights.matrix;
  if (small_batch_parts(ctx, rows, w.rows)) {
    const ShrinkingParts parts = unblocked_parts(ctx, w.rows);
    ctx.begin_product(first_reads(w, parts.first_rows()));
    parallel_rows(ctx.pool, parts, [&](const RowPart& part, int thread) {
      in_bufferfuls(part, [&](int64_t first, int64_t count, int64_t next, bool prefetched) {
        const PrefetchHint prefetch =
            next < 0 ? PrefetchHint{nullptr, 0, prefetched} : prefetch_of(w, 0, next, prefetched);
        gemm_add_part(ctx, product, first, count, x, 0, rows, thread, prefetch);
      });
    });
    return;
  }
  const int64_t per_task = unblocked_rows_per_task(w.rows, ctx.pool.size());
  const int64_t tasks = tasks_for(w.rows, per_task);
  const int64_t step = x.int8_tiles != nullptr ? kMaxRowsPerPass : rows;
  ctx.pool.parallel_for(tasks * tasks_for(rows, step), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % tasks * per_task, m = task / tasks * step;
      gemm_add_part(ctx, product, first, std::min(per_task, w.rows - first), x, m, std::min(step, rows - m),
                    thread);
    }
  });
}

}  // namespace millrace::cpu
