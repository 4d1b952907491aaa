// GEMM and grouped GEMM with 6-bit weights on warpgroup instructions (wgmma_mainloop.cuh).
#include "kernels/cuda/gemm/wgmma_launch.cuh"

namespace millrace::cuda {

template void launch_wgmma_gemm<PackedFormat::kQ6>(const Gemm&, const Launch&);
template void launch_wgmma_grouped_gemm<PackedFormat::kQ6>(const GroupedGemm&, const Launch&);

}  // namespace millrace::cuda
