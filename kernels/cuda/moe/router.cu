// The router of one token per blockIdx.y: RMSNorm, two experts' scores per CTA, and the normed row kept for
// the experts. Latency-bound: the router's rows come to shared memory before the residual is there, and what
// is left is one pass over the row, its norm, and a quarter of a dot product per warp.
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/norm/rmsnorm_row.cuh"
#include "kernels/cuda/quant/mxfp4.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

constexpr int kExpertsPerCta = 2;
constexpr int kWarpsPerExpert = kRowThreads / kWarpLanes / kExpertsPerCta;
constexpr int kBarrier = 1;

// Quad i of a row, as bf16.
__device__ inline void store_bf16_quad(uint16_t* row, int i, float4 v) {
  reinterpret_cast<uint2*>(row)[i] = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
}

// A warp's quarter of row . x, both of `quads` float4 in shared memory. Lanes' strides, then the butterfly.
__device__ inline float dot_part(const float4* row, const float4* x, int quads, int part, int lane) {
  float sum = 0.0f;
  for (int i = part * kWarpLanes + lane; i < quads; i += kWarpsPerExpert * kWarpLanes) {
    const float4 a = row[i], b = x[i];
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    sum = fmaf(a.w, b.w, sum);
  }
  return warp_sum(sum);
}

// shared: router rows [2][cols], the normed row [cols].
__global__ void __launch_bounds__(kRowThreads) router_kernel(const __grid_constant__ Router op) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t loaded;
  __shared__ float partial[kRowThreads / kWarpLanes];
  auto* rows = reinterpret_cast<float4*>(shared);
  const int quads = op.cols / 4, thread = threadIdx.x;
  float4* normed = rows + kExpertsPerCta * quads;
  const int first = static_cast<int>(blockIdx.x) * kExpertsPerCta,
            here = min(kExpertsPerCta, op.experts - first);
  const int64_t token = blockIdx.y;
  if (thread == 0) {
    ptx::barrier_init(&loaded, 1);
    ptx::barrier_init_fence();
    const auto bytes = static_cast<uint32_t>(here * op.cols) * 4u;
    ptx::barrier_arrive_expect(&loaded, bytes);
    ptx::bulk_copy(rows, op.weight + int64_t{first} * op.cols, bytes, &loaded);
  }
  ptx::let_dependents_start();
  RegisterQuads weight;
  weight.load<false>(reinterpret_cast<const float4*>(op.norm_weight), quads, thread);
  const int warp = thread / kWarpLanes, lane = thread % kWarpLanes;
  const int expert = first + thread;  // whose sum this thread ends
  const float bias = thread < here && op.bias != nullptr ? __ldg(op.bias + expert) : 0.0f;
  __syncthreads();  // all wait for the barrier's init
  ptx::wait_for_previous();

  norm_row<kBarrier>(op.x + token * op.cols, op.norm_weight, weight, op.eps, op.cols, thread, partial,
                     [&](int i, float4 v) {
                       normed[i] = v;
                       if (blockIdx.x != 0) return;  // one CTA keeps the row for the experts
                       reinterpret_cast<float4*>(op.normed + token * op.cols)[i] = v;
                       if (op.x_bf16 != nullptr) store_bf16_quad(op.x_bf16 + token * op.cols, i, v);
                     });
  __syncthreads();  // all wait for the normed row
  ptx::barrier_wait(&loaded, 0);
  if (warp / kWarpsPerExpert < here) {
    const float part =
        dot_part(rows + warp / kWarpsPerExpert * quads, normed, quads, warp % kWarpsPerExpert, lane);
    if (lane == 0) partial[warp] = part;
  }
  __syncthreads();  // all wait for the parts
  if (thread >= here) return;
  float score = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarpsPerExpert; ++i) score += partial[thread * kWarpsPerExpert + i];
  op.scores[token * op.experts + expert] = score + bias;
}

// Many tokens, kBatchTokens of them per CTA: the router's rows then come from L2 once for all of these. The
// sums are those of router_kernel. shared: normed rows [kBatchTokens][cols], parts [kBatchTokens]
// [experts][4].
constexpr int kBatchTokens = 8;

__device__ inline void add_products(float4 a, float4 b, float& sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  sum = fmaf(a.w, b.w, sum);
}

__global__ void __launch_bounds__(kRowThreads) batched_router_kernel(const __grid_constant__ Router op) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float partial[kRowThreads / kWarpLanes];
  const int quads = op.cols / 4, thread = threadIdx.x, warp = thread / kWarpLanes, lane = thread % kWarpLanes;
  auto* normed = reinterpret_cast<float4*>(shared);
  auto* parts = reinterpret_cast<float*>(normed + kBatchTokens * quads);
  ptx::let_dependents_start();
  RegisterQuads weight;
  weight.load<false>(reinterpret_cast<const float4*>(op.norm_weight), quads, thread);
  ptx::wait_for_previous();
  const int first = static_cast<int>(blockIdx.x) * kBatchTokens, here = min(kBatchTokens, op.tokens - first);
  for (int k = 0; k < kBatchTokens; ++k) {
    const int64_t token = first + min(k, here - 1);  // past the last: any, nobody reads its sums
    norm_row<kBarrier>(op.x + token * op.cols, op.norm_weight, weight, op.eps, op.cols, thread, partial,
                       [&](int i, float4 v) {
                         normed[k * quads + i] = v;
                         if (k < here) reinterpret_cast<float4*>(op.normed + token * op.cols)[i] = v;
                       });
  }
  __syncthreads();  // all wait for the normed rows
  const auto* router = reinterpret_cast<const float4*>(op.weight);
  const int part = warp % kWarpsPerExpert;
  for (int e = warp / kWarpsPerExpert * 2; e < op.experts;
       e += kRowThreads / kWarpLanes / kWarpsPerExpert * 2) {
    const float4* rows[2] = {router + int64_t{e} * quads,
                             router + int64_t{min(e + 1, op.experts - 1)} * quads};
    float sum[2][kBatchTokens] = {};
    for (int i = part * kWarpLanes + lane; i < quads; i += kWarpsPerExpert * kWarpLanes) {
      const float4 a = __ldg(rows[0] + i), b = __ldg(rows[1] + i);
#pragma unroll
      for (int k = 0; k < kBatchTokens; ++k) {
        const float4 x = normed[k * quads + i];
        add_products(a, x, sum[0][k]);
        add_products(b, x, sum[1][k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatchTokens; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float all = warp_sum(sum[j][k]);
        if (lane == 0 && e + j < op.experts) parts[(k * op.experts + e + j) * kWarpsPerExpert + part] = all;
      }
    }
  }
  __syncthreads();  // all wait for the parts
  for (int i = thread; i < here * op.experts; i += kRowThreads) {
    float score = 0.0f;
#pragma unroll
    for (int j = 0; j < kWarpsPerExpert; ++j) score += parts[i * kWarpsPerExpert + j];
    const float bias = op.bias != nullptr ? __ldg(op.bias + i % op.experts) : 0.0f;
    op.scores[int64_t{first} * op.experts + i] = score + bias;
  }
}

__global__ void __launch_bounds__(kRowThreads)
    rows_to_bf16_kernel(const float* x, int64_t quads, uint16_t* x_bf16) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (i >= quads) return;
  const float4 v = __ldcg(reinterpret_cast<const float4*>(x) + i);
  reinterpret_cast<uint2*>(x_bf16)[i] = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
}

}  // namespace

bool supports_router(int64_t cols, const Device& device) {
  const size_t shared_bytes = size_t{5} * static_cast<size_t>(cols) * sizeof(float);
  return device.has_bulk_copies() && cols % 32 == 0 && shared_bytes <= 200 * 1024;
}

void launch_router(const Router& op, const Launch& at) {
  if (op.tokens == 0) return;
  const size_t batch_bytes =
      kBatchTokens * (static_cast<size_t>(op.cols) + static_cast<size_t>(op.experts) * kWarpsPerExpert) * 4;
  // Up to some hundred tokens, CTAs for four experts of one token each are quicker (36 us for any number of
  // tokens up to a thousand else); beyond, reading the router's rows again for each token is not.
  constexpr int32_t kSmallBatch = 320;
  if (op.x_bf16 == nullptr && op.tokens > kSmallBatch && batch_bytes <= 200 * 1024) {
    allow_shared_memory(batched_router_kernel, batch_bytes);
    const dim3 ctas(static_cast<unsigned>((op.tokens + kBatchTokens - 1) / kBatchTokens));
    return launch_dependent("batched_router_kernel", batched_router_kernel, ctas, kRowThreads, batch_bytes,
                            at, op);
  }
  const size_t shared_bytes = (kExpertsPerCta + 1) * static_cast<size_t>(op.cols) * sizeof(float);
  const dim3 grid(static_cast<unsigned>((op.experts + kExpertsPerCta - 1) / kExpertsPerCta),
                  static_cast<unsigned>(op.tokens));
  const auto ctas = static_cast<int64_t>(grid.x) * grid.y;
  const size_t bytes = ctas <= at.device.sm_count() ? alone_on_sm(shared_bytes, at.device) : shared_bytes;
  allow_shared_memory(router_kernel, alone_on_sm(shared_bytes, at.device));
  launch_dependent("router_kernel", router_kernel, grid, kRowThreads, bytes, at, op);
}

void launch_rows_to_bf16(const float* x, int64_t rows, int64_t cols, uint16_t* x_bf16, const Launch& at) {
  const int64_t quads = rows * cols / 4;
  if (quads == 0) return;
  launch_dependent("rows_to_bf16_kernel", rows_to_bf16_kernel,
                   dim3(static_cast<unsigned>((quads + kRowThreads - 1) / kRowThreads)), kRowThreads, 0, at,
                   x, quads, x_bf16);
}

}  // namespace millrace::cuda
