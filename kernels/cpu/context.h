// What an operation of the CPU kernels runs on: a table of kernels, threads, and scratch of each thread. An
// operation allocates nothing; whoever calls it brings buffers and workspaces whose sizes were asked for
// first.
#pragma once

#include "base/thread_pool.h"
#include "kernels/cpu/arena.h"
#include "kernels/cpu/matmul/row_partition.h"
#include "kernels/cpu/prefetch_order.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

// One thread's own memory for products.
struct GemmScratch {
  float* tile;         // [2][kMaxRowsPerPass][kMaxRowsPerTask]: outputs of a chunk before they are combined
  float* dequantized;  // [kDequantizedRows][max_cols]
};

// Of `threads` threads; max_cols: the widest input of a product.
inline GemmScratch* take_gemm_scratch(Arena& arena, int threads, int64_t max_cols) {
  auto* scratch = arena.take<GemmScratch>(threads);
  for (int t = 0; t < threads; ++t) {
    const GemmScratch own{arena.take<float>(2 * kMaxRowsPerPass * kMaxRowsPerTask),
                          arena.take<float>(kDequantizedRows * max_cols)};
    if (scratch != nullptr) scratch[t] = own;
  }
  return scratch;
}

struct Context {
  const KernelTable& kernels;
  ThreadPool& pool;
  const GemmScratch* scratch = nullptr;  // [pool.size()]; for operations with products
  PrefetchOrder* prefetch = nullptr;     // absent: threads that wait prefetch nothing

  // Few rows of activations and one memory node: reading the weights is all that costs.
  bool small_batch(int64_t rows) const { return rows <= kSmallBatchRows && pool.nodes() == 1; }
  void begin_product(const FirstReads& mine, const FirstReads* following = nullptr) const {
    if (prefetch != nullptr) prefetch->begin_product(pool, mine, following);
  }
};

}  // namespace millrace::cpu
