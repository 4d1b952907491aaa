// GEMM and grouped GEMM with 8-bit weights on warpgroup instructions (wgmma_mainloop.cuh).
#include "kernels/cuda/code.h"
#include "kernels/cuda/gemm/wgmma_launch.cuh"

namespace millrace::cuda {

template void launch_wgmma_gemm<PackedFormat::kQ8>(const Gemm&, const Launch&);
template void launch_wgmma_grouped_gemm<PackedFormat::kQ8>(const GroupedGemm&, const Launch&);

bool code_has_wgmma() {
  cudaFuncAttributes attributes{};
  const auto kernel = gemm_wgmma_kernel<2 * kWgmmaRows, GemmProblem<PackedFormat::kQ8, 2>>;
  check_call(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  // Without sm_90a in the build the kernel is a trap, which takes few registers.
  return attributes.binaryVersion == 90 && attributes.numRegs > 64;
}

}  // namespace millrace::cuda
