// The warpgroup products of bf16 weights (wide_product.cuh).
#include "kernels/cuda/gemm/wgmma_mainloop.cuh"

namespace millrace::cuda {

template void launch_wgmma_linear<PackedFormat::kBf16>(const WideLinear&, const Launch&);
template void launch_wgmma_experts<PackedFormat::kBf16>(const WideExperts&, const Launch&);

}  // namespace millrace::cuda
