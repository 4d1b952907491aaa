// Low-rank updates of products (LoRA): y += B (A x) for those rows of a step that have one. A x is made
// first, over all threads; B's part is added to the rows of y behind the product, or by the thread that has
// them in its cache (gate_up.h). A row's bits depend on its own update alone: A x and B (A x) are float
// products by the 16-lane rule (tables/kernel_table.h), and each is added to the product by one addition.
#pragma once

#include <span>

#include "kernels/cpu/context.h"
#include "kernels/cpu/matmul/weight_matrix.h"

namespace millrace::cpu {

// Neighbouring rows of a product that have the same update.
struct LowRankRun {
  int64_t first, count;   // rows of the product
  const WeightMatrix* a;  // float32 [rank, in]
  const WeightMatrix* b;  // float32 [out, rank]
  float* inner;           // [count][rank]: A x
  int64_t expert = 0;  // of A [experts, rank, in] and B [experts, out, rank], where the product is of experts
};

// inner = A x of every run; x: [rows][in] of the product, rows `stride` apart, or those that `index` names,
// [rows of the product].
void low_rank_inner(const Context& ctx, std::span<const LowRankRun> runs, const float* x, int64_t stride,
                    const int32_t* index = nullptr);

// y += B inner, for rows [m, m + num_m) and columns [first, first + count) of the product, by the calling
// thread. y: row m, column `first`; rows `stride` apart.
void low_rank_add_part(const KernelTable& kernels, std::span<const LowRankRun> runs, int64_t m, int64_t num_m,
                       int64_t first, int64_t count, float* y, int64_t stride);

// The same for all of y, over all threads. y: [rows][cols], rows `stride` apart.
void low_rank_add(const Context& ctx, std::span<const LowRankRun> runs, int64_t cols, float* y,
                  int64_t stride);

}  // namespace millrace::cpu
