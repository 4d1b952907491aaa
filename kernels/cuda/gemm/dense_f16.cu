// Products of plain f16 matrices: dense_wgmma.cuh.
#include "kernels/cuda/gemm/dense_wgmma.cuh"
#include "kernels/cuda/gemm/dense_wgmma.h"

namespace millrace::cuda {

void launch_dense_f16(const DenseGemm& op, int tile, const Launch& at) {
  launch_dense_layout<ptx::WgmmaF16>(op, tile, at);
}

}  // namespace millrace::cuda
