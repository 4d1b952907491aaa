// GEMM with weights of MXFP4 in units on warpgroup instructions (lowbit_wgmma.cuh).
#include "kernels/cuda/gemm/lowbit_wgmma.cuh"

namespace millrace::cuda {

template void launch_lowbit_wgmma<MR_LOWBIT_MXFP4>(const LowbitGemm&, const Launch&);

}  // namespace millrace::cuda
