// RMSNorm over rows (hidden) and over heads (head_dim).
#include "kernels/cuda/code.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kRowThreads = 256;  // a row of some thousands: a dozen values per thread
constexpr int kHeadThreads = 32;  // a head of 64 to 256: one warp, no barrier
constexpr int64_t kHeadSize = 256;

// One CTA per row. A thread reads again only what it alone wrote, so y may be x.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) rmsnorm_kernel(RmsNorm op) {
  __shared__ float partial[kThreads / kWarpLanes];
  const int64_t i = blockIdx.x;
  const int64_t size = op.size;
  const float* from = op.x + (op.source_rows != nullptr ? op.source_rows[i] : i) * op.x_stride;
  float* to = op.y + i * op.y_stride;
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < size; c += kThreads) sum = fmaf(from[c], from[c], sum);
  sum = block_sum<kThreads>(sum, partial);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(size) + op.eps);
  for (int64_t c = threadIdx.x; c < size; c += kThreads) to[c] = from[c] * scale * op.weight[c];
}

}  // namespace

bool has_code_for_device() {
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, rmsnorm_kernel<kRowThreads>) == cudaSuccess;
  cudaGetLastError();
  return found;
}

int code_architecture() {
  cudaFuncAttributes attributes;
  check_call(cudaFuncGetAttributes(&attributes, rmsnorm_kernel<kRowThreads>), "cudaFuncGetAttributes");
  return attributes.ptxVersion;  // of a cubin: what it was made from
}

void launch_rmsnorm(const RmsNorm& op, const Launch& at) {
  if (op.rows == 0) return;
  const auto grid = static_cast<unsigned>(op.rows);
  // By the row's size alone, never by how many rows there are: the choice fixes the order of the sum.
  if (op.size <= kHeadSize) {
    rmsnorm_kernel<kHeadThreads><<<grid, kHeadThreads, 0, at.stream>>>(op);
  } else {
    rmsnorm_kernel<kRowThreads><<<grid, kRowThreads, 0, at.stream>>>(op);
  }
  check_launch("rmsnorm_kernel");
}

void launch_rmsnorm(const float* x, const int32_t* source_rows, const float* weight, float eps, int64_t rows,
                    int64_t size, float* y, const Launch& at) {
  launch_rmsnorm({x, size, source_rows, weight, eps, rows, size, y, size}, at);
}

}  // namespace millrace::cuda
