// One CTA per row, a pass for each sum and one to write. Roofline: memory; rows of a batch are in L2.
#include "kernels/cuda/norm/row_norm.h"

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kRowThreads = 256;  // a row of some thousands: a dozen values per thread
constexpr int kHeadThreads = 32;  // a head of 64 to 256: one warp, no barrier
constexpr int64_t kHeadSize = 256;

// By what a row is shifted and multiplied before its weight: {mean, 1 / deviation}, or {0, 1 / rms}.
template <int kThreads>
__device__ inline float2 shift_and_scale(const RowNorm& op, const float* x) {
  __shared__ float
      partial[2][kThreads / kWarpLanes];  // a part for each sum: nobody writes what others still read
  if (op.kind == NormKind::kNone) return {0.0f, 1.0f};
  const auto size = static_cast<float>(op.size);
  float mean = 0.0f;
  if (op.kind == NormKind::kLayer) {
    for (int64_t c = threadIdx.x; c < op.size; c += kThreads) mean += x[c];
    mean = block_sum<kThreads>(mean, partial[0]) / size;
  }
  float squares = 0.0f;
  for (int64_t c = threadIdx.x; c < op.size; c += kThreads) squares = fmaf(x[c] - mean, x[c] - mean, squares);
  squares = block_sum<kThreads>(squares, partial[1]);
  return {mean, 1.0f / sqrtf(squares / size + op.eps)};
}

// A thread writes only what it alone reads, behind the sums' barriers: y may be x.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) row_norm_kernel(RowNorm op) {
  const int64_t i = blockIdx.x;
  const float* x = op.x + (op.source_rows != nullptr ? op.source_rows[i] : i) * op.size;
  float* y = op.y + i * op.size;
  const float2 by = shift_and_scale<kThreads>(op, x);
  for (int64_t c = threadIdx.x; c < op.size; c += kThreads) {
    float n = (x[c] - by.x) * by.y;
    if (op.weight != nullptr) n *= op.weight[c];
    if (op.bias != nullptr) n += op.bias[c];
    y[c] = op.add ? fmaf(op.scale, n, y[c]) : n;
  }
}

__global__ void __launch_bounds__(kRowThreads)
    scale_softcap_kernel(float scale, float softcap, int64_t size, float* x) {
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kRowThreads) {
    const float scaled = x[i] * scale;
    x[i] = softcap > 0.0f ? softcap * tanhf(scaled / softcap) : scaled;
  }
}

}  // namespace

void launch_row_norm(const RowNorm& op, const Launch& at) {
  if (op.rows == 0) return;
  const auto grid = static_cast<unsigned>(op.rows);
  // By the row's size alone, never by how many rows there are: the choice fixes the order of the sum.
  if (op.size <= kHeadSize) {
    row_norm_kernel<kHeadThreads><<<grid, kHeadThreads, 0, at.stream>>>(op);
  } else {
    row_norm_kernel<kRowThreads><<<grid, kRowThreads, 0, at.stream>>>(op);
  }
  check_launch("row_norm_kernel");
}

void launch_scale_softcap(float scale, float softcap, int64_t size, float* x, const Launch& at) {
  if (size == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 16;  // beyond, a CTA takes several turns
  const int64_t blocks = (size + kRowThreads - 1) / kRowThreads;
  scale_softcap_kernel<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kRowThreads, 0,
                         at.stream>>>(scale, softcap, size, x);
  check_launch("scale_softcap_kernel");
}

}  // namespace millrace::cuda
