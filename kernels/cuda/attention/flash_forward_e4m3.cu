// Every instantiation of the forward kernel for E4M3 codes, and of the kernel that transposes their values.
#include <cuda_fp8.h>

#include "kernels/cuda/attention/flash_forward_launch.cuh"
#include "kernels/cuda/attention/flash_values.cuh"

namespace millrace::cuda {
namespace {

int32_t padded_dim(const mr_flash_problem& p) { return p.head_dim <= 64 && p.value_dim <= 64 ? 64 : 128; }
int64_t value_tiles(const mr_flash_problem& p) {
  return (int64_t{p.max_k} + kFlashScaleKeys - 1) / kFlashScaleKeys;
}

template <int kDim>
void launch_of_dim(const FlashForwardCall& call, const Launch& at) {
  using Code = __nv_fp8_e4m3;
  const mr_flash_problem& problem = call.problem;
  const int64_t tiles = value_tiles(problem);
  if (tiles > 0) {
    flash_values_kernel<kDim>
        <<<static_cast<unsigned>(tiles * problem.kv_heads * problem.batch), kFlashValueThreads<kDim>, 0,
           at.stream>>>(flash_shape(problem), static_cast<const uint8_t*>(call.v.data),
                        flash_strides(call.v, problem.cu_k != nullptr && problem.pages == nullptr),
                        problem.value_dim, static_cast<int32_t>(tiles), call.value_tiles);
    check_launch("flash_values_kernel");
  }
  if (flash_is_decode(problem)) {
    launch_flash_forward_as<FlashForwardConfig<Code, kDim, kDim, 128, 1, 5, false>>(call, at);
  } else {
    // Then without turns; of 128 dimensions there are no registers for it.
    constexpr bool kOverItems = kDim == 64;
    launch_flash_forward_as<
        FlashForwardConfig<Code, kDim, kDim, 128, 2, 4, !kOverItems, false, 0, kOverItems>>(call, at);
  }
}

}  // namespace

size_t flash_value_tiles_bytes(const mr_flash_problem& p) {
  return static_cast<size_t>(value_tiles(p) * p.kv_heads * p.batch) *
         static_cast<size_t>(padded_dim(p) * kFlashScaleKeys);
}

void launch_flash_forward_e4m3(const FlashForwardCall& call, const Launch& at) {
  padded_dim(call.problem) == 64 ? launch_of_dim<64>(call, at) : launch_of_dim<128>(call, at);
}

}  // namespace millrace::cuda
