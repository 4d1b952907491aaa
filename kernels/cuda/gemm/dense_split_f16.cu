// Products of few rows of f16 matrices with K in parts: dense_split.cuh.
#include "kernels/cuda/gemm/dense_split.cuh"
#include "kernels/cuda/gemm/dense_wgmma.h"

namespace millrace::cuda {

bool launch_dense_split_f16(const DenseGemm& op, bool wide, int parts, const Launch& at) {
  return launch_dense_split_layout<ptx::WgmmaF16>(op, wide, parts, at);
}

}  // namespace millrace::cuda
