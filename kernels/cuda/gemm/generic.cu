// GEMM on weights in the file's encoding, for every type: a warp has one output row, dequantizes it eight
// weights per lane at a time and multiplies them with up to eight tokens' activations before it goes on. The
// order of a sum is lanes' strides, then the butterfly over lanes: it depends on the number of columns alone.
//
// Roofline: one token, the bytes of w / 4.3 TB/s; many, the 67 TFLOP/s of FP32, since nothing goes to tensor
// cores.
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/generic.h"
#include "kernels/cuda/quant/dequantize.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = 8;             // output rows per CTA
constexpr int kTokens = 8;            // tokens for which a weight is dequantized once
constexpr int64_t kMaxGridY = 65535;  // CUDA's limit; beyond it a CTA takes several turns

// Elements [c, c + n) of a row of activations, zeros up to 8.
__device__ inline void load_x8(const float* row, int64_t c, int n, bool aligned, float* x) {
  if (n == 8 && aligned) {
    const float4 a = reinterpret_cast<const float4*>(row + c)[0],
                 b = reinterpret_cast<const float4*>(row + c)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i < n ? row[c + i] : 0.0f;
}

// sums[t] = w[row, :] . x[t, :] for t < count, in every lane. x: [count, cols]. All lanes of a warp must
// call.
template <class Decoder, int kCount>
__device__ inline void dot_row(const DeviceMatrix& w, int64_t row, const float* x, int count, float* sums) {
  const int64_t cols = w.cols;
  const bool aligned = cols % 4 == 0;  // then every row of x starts at a multiple of 16 bytes
#pragma unroll
  for (int t = 0; t < kCount; ++t) sums[t] = 0.0f;
  for (int64_t c = threadIdx.x % kWarpLanes * 8; c < cols; c += kWarpLanes * 8) {
    const int n = static_cast<int>(min(int64_t{8}, cols - c));
    float w8[8];
    Decoder::decode8(w, row, c, n, w8);
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      if (t < count) {
        float x8[8];
        load_x8(x + t * cols, c, n, aligned, x8);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[t] = fmaf(w8[i], x8[i], sums[t]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kCount; ++t) sums[t] = warp_sum(sums[t]);
}

// grid: x over output rows, y over tiles of tokens.
template <class Decoder>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    linear_kernel(DeviceMatrix w, const float* bias, const float* x, int64_t count, bool add, float* y) {
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  if (row >= w.rows) return;  // a whole warp: nobody waits for it
  const float offset = bias != nullptr ? bias[row] : 0.0f;
  for (int64_t t0 = static_cast<int64_t>(blockIdx.y) * kTokens; t0 < count;
       t0 += int64_t{gridDim.y} * kTokens) {
    const int here = static_cast<int>(min(int64_t{kTokens}, count - t0));
    float sums[kTokens];
    dot_row<Decoder, kTokens>(w, row, x + t0 * w.cols, here, sums);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (lane == t && t < here) {
        float* to = y + (t0 + t) * w.rows + row;
        const float value = sums[t] + offset;
        *to = add ? *to + value : value;
      }
    }
  }
}

// grid: x over output rows, y over pairs.
template <class Decoder>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    expert_linear_kernel(DeviceMatrix w, const float* bias, const float* x, int64_t pairs_per_x_row,
                         const int32_t* chosen, int64_t pairs, float* y) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  if (row >= w.rows) return;  // a whole warp: nobody waits for it
  for (int64_t pair = blockIdx.y; pair < pairs; pair += gridDim.y) {
    const int64_t expert_row = chosen[pair] * w.rows + row;
    float sum;
    dot_row<Decoder, 1>(w, expert_row, x + pair / pairs_per_x_row * w.cols, 1, &sum);
    if (threadIdx.x % kWarpLanes == 0) {
      y[pair * w.rows + row] = sum + (bias != nullptr ? bias[expert_row] : 0.0f);
    }
  }
}

dim3 grid_for(int64_t rows, int64_t tiles) {
  return {static_cast<unsigned>((rows + kWarps - 1) / kWarps),
          static_cast<unsigned>(tiles < kMaxGridY ? tiles : kMaxGridY)};
}

}  // namespace

void launch_linear(const DeviceMatrix& w, const float* bias, const float* x, int64_t count, bool add,
                   float* y, const Launch& at) {
  if (count == 0) return;
  const dim3 grid = grid_for(w.rows, (count + kTokens - 1) / kTokens);
  with_decoder(w.type, [&](auto decoder) {
    linear_kernel<decltype(decoder)><<<grid, kWarps * kWarpLanes, 0, at.stream>>>(w, bias, x, count, add, y);
  });
  check_launch("linear_kernel");
}

void launch_expert_linear(const DeviceMatrix& w, const float* bias, const float* x, int64_t pairs_per_x_row,
                          const int32_t* chosen, int64_t pairs, float* y, const Launch& at) {
  if (pairs == 0) return;
  const dim3 grid = grid_for(w.rows, pairs);
  with_decoder(w.type, [&](auto decoder) {
    expert_linear_kernel<decltype(decoder)>
        <<<grid, kWarps * kWarpLanes, 0, at.stream>>>(w, bias, x, pairs_per_x_row, chosen, pairs, y);
  });
  check_launch("expert_linear_kernel");
}

}  // namespace millrace::cuda
