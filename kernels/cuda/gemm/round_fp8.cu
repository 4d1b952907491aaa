// Rows to E4M3 codes, one CTA per row, a warp for 128 columns at a time. Roofline: memory.
#include "kernels/cuda/gemm/round_fp8.h"

#include "kernels/cuda/gemv/row.cuh"
#include "kernels/cuda/moe/gelu.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/quant/fp8_patches.h"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/wgmma_e4m3.cuh"

namespace millrace::cuda {
namespace {

#ifdef MILLRACE_HAS_WGMMA

__device__ inline float4 bf16_quad(uint2 words) {
  return {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
          __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u)};
}

// Quad q of the row, one to a lane: those of a warp are 128 columns. All lanes call; quads behind the row's
// end are zeros and go nowhere.
__device__ inline void store_quad(const Fp8Rows& to, int64_t row, int64_t cols, int q, float4 x) {
  float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
  const bool none = largest < quant::kFp8Least;
  const float by = none ? 0.0f : quant::kFp8Largest / largest;
  if (q < cols / 4) {
    reinterpret_cast<uint32_t*>(to.codes + row * cols)[q] =
        ptx::pack_e4m3(x.x * by, x.y * by, x.z * by, x.w * by);
  }
  if (q % kWarpLanes == 0 && q < cols / 4)
    to.scales[row * ((cols + 127) / 128) + q / kWarpLanes] = none ? 0.0f : largest / quant::kFp8Largest;
}

#endif

// One CTA per row.
__global__ void __launch_bounds__(kRoundThreads) round_fp8_kernel(const __grid_constant__ RoundFp8 op) {
#ifdef MILLRACE_HAS_WGMMA
  __shared__ float partial[kRoundWarps];
  ptx::let_dependents_start();
  const int quads = static_cast<int>(op.cols / 4), padded = (quads + 31) / 32 * 32;
  const int rest = static_cast<int>(threadIdx.x) + kRoundKept * kRoundThreads;
  RowQuads weight, kept;
  weight.load<false>(op.norm_weight, quads);
  ptx::wait_for_previous();
  const int64_t row = blockIdx.x;
  const float* const x = op.x + row * op.cols;
  const auto quad = [&](const float* of, int i) {
    return i < quads ? __ldcg(reinterpret_cast<const float4*>(of) + i) : float4{};
  };
  kept.load<true>(x, quads);
  float scale = 1.0f;
  if (op.norm_weight != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kRoundKept; ++j) sum = squares(kept.v[j], sum);
    for (int i = rest; i < quads; i += kRoundThreads) sum = squares(quad(x, i), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % kWarpLanes == 0) partial[threadIdx.x / kWarpLanes] = sum;
    __syncthreads();  // all are there
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kRoundWarps; ++i) total += partial[i];
    scale = 1.0f / sqrtf(total / static_cast<float>(op.cols) + op.eps);
  }
  const auto normed = [&](float4 v, float4 w) {
    if (op.norm_weight == nullptr) return v;
    return float4{v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w};
  };
#pragma unroll
  for (int j = 0; j < kRoundKept; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kRoundThreads;
    if (i < padded) store_quad(op.to, row, op.cols, i, normed(kept.v[j], weight.v[j]));
  }
  for (int i = rest; i < padded; i += kRoundThreads) {
    const float4 w = op.norm_weight != nullptr ? quad(op.norm_weight, i) : float4{};
    store_quad(op.to, row, op.cols, i, normed(quad(x, i), w));
  }
#else
  __trap();
#endif
}

__global__ void __launch_bounds__(kRoundThreads) activate_fp8_kernel(const __grid_constant__ ActivateFp8 op) {
#ifdef MILLRACE_HAS_WGMMA
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int quads = static_cast<int>(op.cols / 4), padded = (quads + 31) / 32 * 32;
  const int64_t row = blockIdx.x;
  const auto quad = [&](const uint16_t* of, int i) {
    return i < quads ? bf16_quad(__ldcg(reinterpret_cast<const uint2*>(of + row * op.cols) + i)) : float4{};
  };
  for (int i = static_cast<int>(threadIdx.x); i < padded; i += kRoundThreads) {
    const float4 g = quad(op.gate, i), u = quad(op.up, i);
    store_quad(op.to, row, op.cols, i,
               {activate_kind(op.kind, g.x) * u.x, activate_kind(op.kind, g.y) * u.y,
                activate_kind(op.kind, g.z) * u.z, activate_kind(op.kind, g.w) * u.w});
  }
#else
  __trap();
#endif
}

}  // namespace

void launch_round_fp8(const RoundFp8& op, const Launch& at) {
  if (op.rows == 0) return;
  launch_dependent("round_fp8_kernel", round_fp8_kernel, dim3(static_cast<unsigned>(op.rows)), kRoundThreads,
                   0, at, op);
}

void launch_activate_fp8(const ActivateFp8& op, const Launch& at) {
  if (op.rows == 0) return;
  launch_dependent("activate_fp8_kernel", activate_fp8_kernel, dim3(static_cast<unsigned>(op.rows)),
                   kRoundThreads, 0, at, op);
}

}  // namespace millrace::cuda
