#include "kernels/cuda/read_bandwidth.h"

#include <algorithm>

#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 512, kUnroll = 8;

// 16 bytes a lane, eight loads under way at once. Nothing is kept unless all words add up to what they never
// do: the buffer is zeros.
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* from, int64_t count, uint32_t* out) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  uint32_t sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += kUnroll * step) {
    uint4 words[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) words[j] = i + j * step < count ? __ldcs(from + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum |= words[j].x | words[j].y | words[j].z | words[j].w;
  }
  if (sum != 0) *out = sum;
}

}  // namespace

double measure_read_bandwidth(const Launch& at) {
  constexpr size_t kBytes = size_t{1} << 30;  // some twenty times the largest L2
  constexpr int kPasses = 5;
  const DeviceBuffer buffer(kBytes, "the buffer to measure bandwidth with"), out(16, "a word");
  check_call(cudaMemsetAsync(buffer.as<void>(), 0, kBytes, at.stream), "cudaMemsetAsync");
  cudaEvent_t begin, end;
  check_call(cudaEventCreate(&begin), "cudaEventCreate");
  check_call(cudaEventCreate(&end), "cudaEventCreate");
  float best_ms = 0.0f;
  for (int pass = 0; pass < kPasses; ++pass) {
    check_call(cudaEventRecord(begin, at.stream), "cudaEventRecord");
    read_kernel<<<static_cast<unsigned>(4 * at.device.sm_count()), kThreads, 0, at.stream>>>(
        buffer.as<const uint4>(), static_cast<int64_t>(kBytes / sizeof(uint4)), out.as<uint32_t>());
    check_launch("read_kernel");
    check_call(cudaEventRecord(end, at.stream), "cudaEventRecord");
    check_call(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0.0f;
    check_call(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    best_ms = pass == 0 ? ms : std::min(best_ms, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return static_cast<double>(kBytes) / (1e-3 * best_ms);
}

}  // namespace millrace::cuda
