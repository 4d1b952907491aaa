// Forward, from the call to its kernels: tensor maps, how rows are packed and keys are split, and the kernel
// that joins splits.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention/flash_forward_call.h"
#include "kernels/cuda/attention/flash_forward_consumer.cuh"

namespace millrace::cuda {

// A CTA a row: its splits joined, eighth by eighth of them a warp each, then the warps in order, then the
// sink.
inline constexpr int kFlashCombineWarps = 8;
template <class Element>
__global__ void __launch_bounds__(kFlashCombineWarps* kWarpLanes)
    flash_combine_kernel(const __grid_constant__ FlashForwardParams p) {
  __shared__ float4 sums[kFlashCombineWarps][2][kWarpLanes];
  __shared__ float weights[kFlashCombineWarps];
  const FlashShape& s = p.shape;
  const int64_t row = blockIdx.x, head_at = row / s.max_q;
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes),
            warp = static_cast<int>(threadIdx.x / kWarpLanes);
  const auto query = static_cast<int32_t>(row % s.max_q), b = static_cast<int32_t>(head_at / s.heads),
             head = static_cast<int32_t>(head_at % s.heads);
  const FlashSequence seq(s, b);
  if (query >= seq.q_len) return;
  const int32_t splits = p.schedule.splits;
  const float* lse = p.partial_lse + row * splits;
  const float sink = s.sinks != nullptr ? __ldg(s.sinks + head) * kFlashLog2e : -INFINITY;
  float all = sink;
  for (int32_t i = lane; i < splits; i += kWarpLanes) all = fmaxf(all, lse[i]);
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    all = fmaxf(all, __shfl_xor_sync(kAllLanes, all, distance));
  }
  const float base = all == -INFINITY ? 0.0f : all;
  float sum = 0.0f;
  float4 acc[2] = {};
#pragma unroll 4
  for (int32_t i = warp; i < splits; i += kFlashCombineWarps) {
    const float weight = ptx::exp2_approx(lse[i] - base);  // 0: nothing was written, or nothing counts
    sum += weight;
    const float* from = p.partial_out + (row * splits + i) * p.value_dim + lane * 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (weight == 0.0f || c * 128 + lane * 4 >= p.value_dim) continue;
      const float4 x = *reinterpret_cast<const float4*>(from + c * 128);
      acc[c].x = fmaf(weight, x.x, acc[c].x), acc[c].y = fmaf(weight, x.y, acc[c].y);
      acc[c].z = fmaf(weight, x.z, acc[c].z), acc[c].w = fmaf(weight, x.w, acc[c].w);
    }
  }
  sums[warp][0][lane] = acc[0], sums[warp][1][lane] = acc[1];
  if (lane == 0) weights[warp] = sum;
  __syncthreads();  // all warps' sums are there
  if (warp > 1 || warp * 128 + lane * 4 >= p.value_dim) return;
  sum = 0.0f;
  float4 total{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < kFlashCombineWarps; ++w) {
    const float4 x = sums[w][warp][lane];
    sum += weights[w];
    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }
  sum += ptx::exp2_approx(sink - base);
  const float inverse = sum > 0.0f ? 1.0f / sum : sum;
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[flash_lse_at(s, b, seq.q_start, head) + query] =
        sum == 0.0f ? -INFINITY : fmaf(base, kFlashLn2, logf(sum));
  }
  Element* out = static_cast<Element*>(p.out) + flash_row_at(p.out_strides, b, seq.q_start, query, head);
  *reinterpret_cast<uint2*>(out + warp * 128 + lane * 4) =
      uint2{flash_pack<Element>(total.x * inverse, total.y * inverse),
            flash_pack<Element>(total.z * inverse, total.w * inverse)};
}

template <class C>
void make_flash_forward_maps(FlashForwardParams& p, const FlashForwardCall& call, const Device& device) {
  const mr_flash_problem& problem = call.problem;
  const int bytes = sizeof(typename C::Element);
  const bool ragged = problem.cu_q != nullptr, ragged_k = problem.cu_k != nullptr;
  p.q = p.pack > 1 ? flash_group_map(device, call.q, bytes, ragged, problem.head_dim, problem.max_q,
                                     problem.kv_heads, p.pack, problem.batch, C::kRows)
                   : flash_map(device, call.q, bytes, ragged, problem.head_dim, problem.max_q, problem.heads,
                               problem.batch, C::kRows);
  if constexpr (C::kCodes) {
    p.q_scales = problem.q_scales, p.k_scales = problem.k_scales, p.v_scales = problem.v_scales;
    p.key_blocks = (problem.max_k + kFlashScaleKeys - 1) / kFlashScaleKeys;
    p.value_tiles = call.value_tiles;
  }
  if (problem.max_k == 0) return;  // nothing is loaded, and there may be no memory to point to
  if (problem.pages != nullptr) {
    p.box_rows = 16;
    for (const int32_t rows : {32, 64, 128}) {
      if (problem.page_tokens % rows == 0 && C::kTileKeys % rows == 0) p.box_rows = rows;
    }
    const auto box = static_cast<uint32_t>(p.box_rows);
    const int32_t head_dim = problem.head_dim, value_dim = problem.value_dim, heads = problem.kv_heads;
    p.k = flash_page_map(device, call.k, bytes, head_dim, problem.page_tokens, heads, box);
    p.k_ends = flash_page_end_map(device, call.k, bytes, head_dim, problem.page_tokens, heads, box);
    if (C::kCodes) return;
    p.v = flash_page_map(device, call.v, bytes, value_dim, problem.page_tokens, heads, box);
    p.v_ends = flash_page_end_map(device, call.v, bytes, value_dim, problem.page_tokens, heads, box);
    return;
  }
  const uint32_t rows = C::kSparse ? 64 : C::kWindow ? static_cast<uint32_t>(p.window_rows) : C::kTileKeys;
  p.k = flash_map(device, call.k, bytes, ragged_k, problem.head_dim, problem.max_k, problem.kv_heads,
                  problem.batch, rows);
  if (C::kCodes) return;
  p.v = flash_map(device, call.v, bytes, ragged_k, problem.value_dim, problem.max_k, problem.kv_heads,
                  problem.batch, rows);
}

template <class C>
void launch_flash_forward_as(const FlashForwardCall& call, const Launch& at) {
  const mr_flash_problem& problem = call.problem;
  FlashForwardParams p{};
  p.shape = flash_shape(problem);
  p.out_strides = flash_strides(call.out, problem.cu_q != nullptr);
  p.out = call.out.data;
  p.lse = call.lse;
  p.value_dim = problem.value_dim;
  // All heads of a group in one tile: its keys are loaded once, and rows of fewer tokens see fewer keys that
  // others do not.
  p.pack = !C::kSparse && C::kRows % p.shape.group == 0 ? p.shape.group : 1;
  p.tile_tokens = C::kRows / p.pack;
  p.window_rows = C::kWindow ? C::kTileKeys + ((C::kRows - 64) / p.pack + 15) / 16 * 16 : 0;
  make_flash_forward_maps<C>(p, call, at.device);
  if constexpr (C::kSparse) {
    p.block_keys = problem.blocks->block_k, p.block_rows = problem.blocks->q_blocks;
    p.block_starts = problem.blocks->row_starts, p.block_columns = problem.blocks->columns;
  }
  const int64_t tiles = (problem.max_q + p.tile_tokens - 1) / p.tile_tokens;
  const int64_t heads = problem.heads / p.pack;
  // Half of L2 (50 MB) for a section's keys and values.
  const int64_t head_bytes = int64_t{problem.max_k} * (C::kDim + C::kDimV) * sizeof(typename C::Element);
  const int64_t kv_heads = std::max<int64_t>(1, (int64_t{24} << 20) / std::max<int64_t>(1, head_bytes));
  const int64_t section = std::min<int64_t>(kv_heads * p.shape.group / p.pack, problem.batch * heads);
  int32_t splits = 1;
  if (call.partial != nullptr) {
    splits = call.splits;
    p.split_tiles = kFlashSplitKeys / C::kTileKeys;
    p.partial_out = call.partial;
    p.partial_lse = call.partial_lse;
  }
  p.schedule = {call.counter,
                call.tile_starts,
                static_cast<int32_t>(tiles),
                static_cast<int32_t>(heads),
                splits,
                static_cast<int32_t>(section)};
  if (!C::kWindow || call.tile_starts != nullptr) {
    flash_plan_kernel<<<1, kFlashPlanThreads, 0, at.stream>>>(problem.cu_q, problem.batch, p.tile_tokens,
                                                              call.counter, call.tile_starts);
    check_launch("flash_plan_kernel");
  }
  const auto kernel = flash_forward_kernel<C>;
  allow_shared_memory(kernel, C::kSharedBytes);
  const int64_t items = tiles * problem.batch * heads * splits;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, at.device.sm_count()));
  kernel<<<grid, C::kThreads, C::kSharedBytes, at.stream>>>(p);
  check_launch("flash_forward_kernel");
  if (call.partial == nullptr) return;
  const int64_t rows = int64_t{problem.batch} * problem.heads * problem.max_q;
  flash_combine_kernel<typename C::Output>
      <<<static_cast<unsigned>(rows), kFlashCombineWarps * kWarpLanes, 0, at.stream>>>(p);
  check_launch("flash_combine_kernel");
}

}  // namespace millrace::cuda
