#include "kernels/cpu/matmul/low_rank.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

constexpr int64_t kRowsAtATime = 16;   // of x: a task's, or those added together
constexpr int64_t kColsAtATime = 128;  // of y: a task's, 8 KiB with the rows

MatmulFn float_product(const KernelTable& kernels) { return kernels.matmul[static_cast<int>(Format::kF32)]; }

Panel float_panel(const float* x, int64_t stride) {
  return {reinterpret_cast<const uint8_t*>(x), stride * static_cast<int64_t>(sizeof(float)), nullptr};
}

}  // namespace

void low_rank_inner(const Context& ctx, std::span<const LowRankRun> runs, const float* x, int64_t stride,
                    const int32_t* index) {
  if (runs.empty()) return;
  int64_t tasks = 0;
  for (const LowRankRun& run : runs) tasks += tasks_for(run.count, kRowsAtATime);
  ctx.pool.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const LowRankRun* run = runs.data();
      int64_t at = task;
      for (; at >= tasks_for(run->count, kRowsAtATime); ++run) at -= tasks_for(run->count, kRowsAtATime);
      const int64_t row = at * kRowsAtATime, rank = run->a->rows;
      const int64_t first = run->first + row;
      Panel from = float_panel(index == nullptr ? x + first * stride : x, stride);
      if (index != nullptr) from.index = index + first;
      float_product(ctx.kernels)(run->a->matrix, run->expert * run->a->expert_rows, rank, from,
                                 std::min(kRowsAtATime, run->count - row), run->inner + row * rank, rank);
    }
  });
}

void low_rank_add_part(const KernelTable& kernels, std::span<const LowRankRun> runs, int64_t m, int64_t num_m,
                       int64_t first, int64_t count, float* y, int64_t stride) {
  float sum[kRowsAtATime * kColsAtATime];
  for (const LowRankRun& run : runs) {
    const int64_t begin = std::max(m, run.first), end = std::min(m + num_m, run.first + run.count);
    const int64_t rank = run.b->cols;
    for (int64_t row = begin; row < end; row += kRowsAtATime) {
      const int64_t rows = std::min(kRowsAtATime, end - row);
      const Panel inner = float_panel(run.inner + (row - run.first) * rank, rank);
      for (int64_t c = 0; c < count; c += kColsAtATime) {
        const int64_t cols = std::min(kColsAtATime, count - c);
        float_product(kernels)(run.b->matrix, run.expert * run.b->expert_rows + first + c, cols, inner, rows,
                               sum, cols);
        for (int64_t i = 0; i < rows; ++i) {
          kernels.scale_add(y + (row - m + i) * stride + c, 1.0f, sum + i * cols, 1.0f, cols);  // their sum
        }
      }
    }
  }
}

void low_rank_add(const Context& ctx, std::span<const LowRankRun> runs, int64_t cols, float* y,
                  int64_t stride) {
  if (runs.empty()) return;
  const int64_t rows = runs.back().first + runs.back().count;
  ctx.pool.parallel_for(tasks_for(cols, kColsAtATime), 1, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kColsAtATime, count = std::min(cols, end * kColsAtATime) - first;
    low_rank_add_part(ctx.kernels, runs, 0, rows, first, count, y + first, stride);
  });
}

}  // namespace millrace::cpu
