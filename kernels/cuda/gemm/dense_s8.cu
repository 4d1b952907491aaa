// Products of plain int8 matrices: dense_wgmma.cuh.
#include "kernels/cuda/gemm/dense_wgmma.cuh"
#include "kernels/cuda/gemm/dense_wgmma.h"

namespace millrace::cuda {

void launch_dense_s8(const DenseGemm& op, int tile, const Launch& at) {
  launch_dense_layout<ptx::WgmmaS8>(op, tile, at);
}

}  // namespace millrace::cuda
