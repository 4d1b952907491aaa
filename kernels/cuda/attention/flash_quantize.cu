// q, k, v -> E4M3 codes with a scale per row or per 128 positions, after a Hadamard rotation where asked for.
// A CTA has a block of rows of one head of one sequence: it finds the largest magnitude first and reads the
// rows again.
#include <cuda_fp8.h>

#include "kernels/cuda/attention/flash.h"
#include "kernels/cuda/attention/flash_problem.cuh"

namespace millrace::cuda {
namespace {

constexpr int kQuantizeWarps = 8, kMaxChunks = 256 / kWarpLanes;
constexpr float kLargestCode = 448.0f;

struct QuantizeParams {
  const void* x;
  uint8_t* codes;
  float* scales;
  FlashStrides x_strides, code_strides;
  int32_t seq, heads, dim, rows_per_scale, rotated;  // rotated: neighbours that are rotated together, 1: none
};

// A warp's row in registers, element i * 32 + lane in v[i], rotated. A butterfly between neighbours at a
// distance is a shuffle below 32 and an exchange of registers from there on.
template <class Element>
__device__ void load_row(const QuantizeParams& p, int64_t at, float (&v)[kMaxChunks]) {
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
  const auto* x = static_cast<const Element*>(p.x) + at;
#pragma unroll
  for (int i = 0; i < kMaxChunks; ++i) {
    const int column = i * kWarpLanes + lane;
    v[i] = 0.0f;
    if (column < p.dim) {
      if constexpr (std::is_same_v<Element, __half>) {
        v[i] = __half2float(x[column]);
      } else {
        v[i] = __bfloat162float(x[column]);
      }
    }
  }
  for (int distance = 1; distance < kWarpLanes && distance < p.rotated; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, v[i], distance);
      v[i] = (lane & distance) != 0 ? other - v[i] : v[i] + other;
    }
  }
#pragma unroll
  for (int distance = 1; distance < kMaxChunks; distance *= 2) {
    if (distance * kWarpLanes >= p.rotated) break;
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) {
      if ((i & distance) != 0) continue;
      const float a = v[i], b = v[i ^ distance];
      v[i] = a + b, v[i ^ distance] = a - b;
    }
  }
  const float norm = p.rotated > 1 ? rsqrtf(static_cast<float>(p.rotated)) : 1.0f;
#pragma unroll
  for (int i = 0; i < kMaxChunks; ++i) v[i] *= norm;
}

template <class Element>
__global__ void __launch_bounds__(kQuantizeWarps* kWarpLanes)
    flash_quantize_kernel(const __grid_constant__ QuantizeParams p) {
  __shared__ float largest[kQuantizeWarps];
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes),
            warp = static_cast<int>(threadIdx.x / kWarpLanes);
  const auto head = static_cast<int32_t>(blockIdx.y), b = static_cast<int32_t>(blockIdx.z);
  // With a scale per row every warp has a row of its own.
  const bool by_row = p.rows_per_scale == 1;
  const int32_t block_rows = by_row ? kQuantizeWarps : p.rows_per_scale;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * block_rows, past = min(first + block_rows, p.seq);
  float v[kMaxChunks], most = 0.0f;
  for (int32_t row = first + warp; row < past; row += kQuantizeWarps) {
    load_row<Element>(p, flash_row_at(p.x_strides, b, 0, row, head), v);
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) most = fmaxf(most, fabsf(v[i]));
  }
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
  }
  if (!by_row) {
    if (lane == 0) largest[warp] = most;
    __syncthreads();  // all warps' are there
#pragma unroll
    for (int i = 0; i < kQuantizeWarps; ++i) most = fmaxf(most, largest[i]);
  }
  const float scale = most > 0.0f ? most / kLargestCode : 1.0f;
  for (int32_t row = first + warp; row < past; row += kQuantizeWarps) {
    if (!by_row) load_row<Element>(p, flash_row_at(p.x_strides, b, 0, row, head), v);
    uint8_t* codes = p.codes + flash_row_at(p.code_strides, b, 0, row, head);
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) {
      const int column = i * kWarpLanes + lane;
      if (column < p.dim) codes[column] = __nv_cvt_float_to_fp8(v[i] / scale, __NV_SATFINITE, __NV_E4M3);
    }
    if (by_row && lane == 0) p.scales[(int64_t{b} * p.seq + row) * p.heads + head] = scale;
  }
  if (!by_row && threadIdx.x == 0) {
    p.scales[(int64_t{b} * p.heads + head) * ((p.seq + block_rows - 1) / block_rows) + blockIdx.x] = scale;
  }
}

}  // namespace

void launch_flash_quantize(const mr_flash_quantize_args& args, const Launch& at) {
  if (args.batch == 0 || args.seq == 0 || args.heads == 0) return;
  const int32_t rotated = args.rotate != 0 ? args.dim & -args.dim : 1;  // the largest power of two in dim
  const QuantizeParams p{args.x.data,
                         static_cast<uint8_t*>(args.codes.data),
                         args.scales,
                         flash_strides(args.x, false),
                         flash_strides(args.codes, false),
                         args.seq,
                         args.heads,
                         args.dim,
                         args.rows_per_scale,
                         rotated};
  const int32_t block_rows = args.rows_per_scale == 1 ? kQuantizeWarps : args.rows_per_scale;
  const dim3 grid(static_cast<unsigned>((args.seq + block_rows - 1) / block_rows),
                  static_cast<unsigned>(args.heads), static_cast<unsigned>(args.batch));
  const auto kernel =
      args.type == MR_BF16 ? flash_quantize_kernel<__nv_bfloat16> : flash_quantize_kernel<__half>;
  kernel<<<grid, kQuantizeWarps * kWarpLanes, 0, at.stream>>>(p);
  check_launch("flash_quantize_kernel");
}

}  // namespace millrace::cuda
