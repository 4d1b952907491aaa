// A chunk of a product: picks the kernel for the weights' type and takes the rows of activations in passes
// that stay in the cache. Callers cut products into chunks; nothing here knows threads.
#pragma once

#include "kernels/cpu/matmul/activations.h"

namespace millrace::cpu {

// Rows [first, first + count) of an expert's matrix (0 of a plain one).
struct WeightChunk {
  const WeightMatrix& matrix;
  int64_t expert, first, count;
};

// out[m * out_stride + r] = W[expert][first + r] . x[m], r < count, m < num_m. dequantized: the thread's
// scratch.
void gemm_chunk(const KernelTable& kernels, const WeightChunk& w, const ActivationRows& x, int64_t num_m,
                float* out, int64_t out_stride, float* dequantized, const PrefetchHint& prefetch = {});

}  // namespace millrace::cpu
