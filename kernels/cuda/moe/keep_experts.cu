// What is done to a choice of experts before they multiply. First: which of the chosen experts are in this
// GPU's memory, where another device has the others of the layer. What is not here is multiplied all the
// same, by an expert that is, and weighed with zero: the launches do not depend on the choice, and the other
// device takes longer. Latency-bound.
#include "kernels/cuda/moe/moe.h"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void keep_experts_kernel(const int32_t* local, int count, int64_t pairs, int32_t* chosen,
                                    float* weights) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  const int32_t expert = chosen[i], here = local[expert];
  chosen[i] = here >= 0 ? here : expert % count;
  if (here < 0) weights[i] = 0.0f;
}

__global__ void __launch_bounds__(kThreads)
    scale_chosen_kernel(const float* scales, int64_t pairs, const int32_t* chosen, float* weights) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < pairs) weights[i] *= scales[chosen[i]];
}

}  // namespace

void launch_keep_experts(const int32_t* local, int count, int64_t pairs, int32_t* chosen, float* weights,
                         const Launch& at) {
  if (pairs == 0) return;
  const auto blocks = static_cast<unsigned>((pairs + kThreads - 1) / kThreads);
  keep_experts_kernel<<<blocks, kThreads, 0, at.stream>>>(local, count, pairs, chosen, weights);
  check_launch("keep_experts_kernel");
}

void launch_scale_chosen(const float* scales, int64_t pairs, const int32_t* chosen, float* weights,
                         const Launch& at) {
  if (pairs == 0) return;
  const auto blocks = static_cast<unsigned>((pairs + kThreads - 1) / kThreads);
  scale_chosen_kernel<<<blocks, kThreads, 0, at.stream>>>(scales, pairs, chosen, weights);
  check_launch("scale_chosen_kernel");
}

}  // namespace millrace::cuda
