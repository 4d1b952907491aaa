// Comparing two results word by word, as tuning does with its candidates.
#include "kernels/cuda/compare.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {
namespace {

__global__ void count_differences_kernel(const uint32_t* a, const uint32_t* b, int64_t words,
                                         unsigned long long* count) {
  unsigned long long mine = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) mine += a[i] != b[i];
  if (mine > 0) atomicAdd(count, mine);
}

}  // namespace

void launch_count_differences(const void* a, const void* b, int64_t words, uint64_t* count,
                              const Launch& at) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  count_differences_kernel<<<1024, 256, 0, at.stream>>>(static_cast<const uint32_t*>(a),
                                                        static_cast<const uint32_t*>(b), words,
                                                        reinterpret_cast<unsigned long long*>(count));
  check_launch("count_differences_kernel");
}

}  // namespace millrace::cuda
