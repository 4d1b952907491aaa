// The warpgroup products of 8-bit weights (wide_product.cuh).
#include "kernels/cuda/code.h"
#include "kernels/cuda/gemm/wgmma_mainloop.cuh"

namespace millrace::cuda {

template void launch_wgmma_linear<PackedFormat::kQ8>(const WideLinear&, const Launch&);
template void launch_wgmma_experts<PackedFormat::kQ8>(const WideExperts&, const Launch&);

bool code_has_wgmma() {
  cudaFuncAttributes attributes{};
  const auto kernel = wide_product_kernel<2 * kWgmmaRows, LinearProblem<PackedFormat::kQ8, 2>>;
  check_call(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  // Without sm_90a in the build the kernel is a trap, which takes few registers.
  return attributes.binaryVersion == 90 && attributes.numRegs > 64;
}

}  // namespace millrace::cuda
