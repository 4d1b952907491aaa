// The warpgroup products of MXFP4 weights (wide_product.cuh).
#include "kernels/cuda/gemm/wgmma_mainloop.cuh"

namespace millrace::cuda {

template void launch_wgmma_linear<PackedFormat::kMx4>(const WideLinear&, const Launch&);
template void launch_wgmma_experts<PackedFormat::kMx4>(const WideExperts&, const Launch&);

}  // namespace millrace::cuda
