// GEMM with weights of INT4_32 in units on warpgroup instructions (lowbit_wgmma.cuh).
#include "kernels/cuda/gemm/lowbit_wgmma.cuh"

namespace millrace::cuda {

template void launch_lowbit_wgmma<MR_LOWBIT_INT4_32>(const LowbitGemm&, const Launch&);

}  // namespace millrace::cuda
