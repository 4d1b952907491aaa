// How fast this GPU multiplies: the limit that `millrace bench --roofline` compares with.
#pragma once

#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

// Operations a second, a multiply-add counts two: the best of several runs of the library's product of
// 8,192^3 (kBf16, or kE4m3 with scales) on random numbers. For GPUs with warpgroup products. Waits for the
// stream.
double measure_product_rate(DenseType type, const Launch& at);

}  // namespace millrace::cuda
