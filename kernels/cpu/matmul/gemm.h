// Dense products over all threads, y = x W^T + b: GEMM for many rows of activations, GEMV for small batches,
// where rows of weights are handed out in shrinking parts and prefetched across them. A row's bits are the
// same either way.
#pragma once

#include <span>

#include "kernels/cpu/matmul/gemm_chunk.h"

namespace millrace::cpu {

struct GemmProduct {
  LinearWeights weights;  // [out rows, cols]
  float* out;             // [rows][out rows]
  int64_t stride;         // of out, at least its out rows
};

// Products of the same input, shared out as one loop. ctx has scratch.
void gemm(const Context& ctx, std::span<const GemmProduct> products, const ActivationRows& x, int64_t rows);

// out += x W^T + b
void gemm_add(const Context& ctx, const GemmProduct& product, const ActivationRows& x, int64_t rows);

// Output columns [first, first + count) of rows [m, m + num_m) of x, by one thread.
void gemm_part(const Context& ctx, const GemmProduct& product, int64_t first, int64_t count,
               const ActivationRows& x, int64_t m, int64_t num_m, int thread,
               const PrefetchHint& prefetch = {});

}  // namespace millrace::cpu
