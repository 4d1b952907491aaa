// Backward, from the call to its kernels.
#pragma once

#include "kernels/cuda/attention/flash_backward.cuh"
#include "kernels/cuda/attention/flash_backward_call.h"
#include "kernels/cuda/attention/flash_backward_rows.cuh"

namespace millrace::cuda {

// Of fixed point: what bounds dQ, and columns' factors. See flash_backward_rows.cuh.
template <class C>
void launch_flash_bounds(const FlashBackwardCall& call, const FlashShape& shape, const Launch& at) {
  const mr_flash_problem& problem = call.problem;
  const bool ragged = problem.cu_k != nullptr;
  const int64_t kv_heads = int64_t{problem.batch} * problem.kv_heads;
  MILLRACE_CUDA_TRY(
      cudaMemsetAsync(call.bounds, 0, static_cast<size_t>(kv_heads * (C::kDim + 1)) * 4, at.stream));
  const int32_t chunks = (problem.max_k + kFlashBoundRows - 1) / kFlashBoundRows;
  if (chunks > 0) {
    flash_bounds_kernel<typename C::Element>
        <<<static_cast<unsigned>(chunks * kv_heads), kFlashRowThreads, 0, at.stream>>>(
            shape, call.k.data, call.v.data, flash_strides(call.k, ragged), flash_strides(call.v, ragged),
            problem.head_dim, problem.value_dim, chunks, C::kDim, reinterpret_cast<uint32_t*>(call.bounds));
    check_launch("flash_bounds_kernel");
  }
  flash_column_factors_kernel<<<static_cast<unsigned>(kv_heads), C::kDim, 0, at.stream>>>(
      call.bounds, C::kDim, call.column_factors);
  check_launch("flash_column_factors_kernel");
}

// There are keys; queries there may be none of.
template <class C>
FlashBackwardParams flash_backward_params(const FlashBackwardCall& call, const FlashShape& shape,
                                          int32_t query_tiles, const Device& device) {
  const mr_flash_problem& problem = call.problem;
  const mr_flash_gradients& g = call.gradients;
  const bool ragged = problem.cu_q != nullptr, ragged_k = problem.cu_k != nullptr;
  const int bytes = sizeof(typename C::Element);
  FlashBackwardParams p{};
  if (query_tiles > 0) {
    p.q = flash_map(device, call.q, bytes, ragged, problem.head_dim, problem.max_q, problem.heads,
                    problem.batch, C::kQueries);
    p.d_out = flash_map(device, g.d_out, bytes, ragged, problem.value_dim, problem.max_q, problem.heads,
                        problem.batch, C::kQueries);
  }
  p.k = flash_map(device, call.k, bytes, ragged_k, problem.head_dim, problem.max_k, problem.kv_heads,
                  problem.batch, C::kKeys);
  p.v = flash_map(device, call.v, bytes, ragged_k, problem.value_dim, problem.max_k, problem.kv_heads,
                  problem.batch, C::kKeys);
  p.shape = shape;
  p.head_dim = problem.head_dim, p.value_dim = problem.value_dim;
  // Half of L2 for a section's queries and gradients.
  const int64_t head_bytes =
      int64_t{problem.max_q} * p.shape.group * (problem.head_dim + problem.value_dim) * bytes;
  const int64_t section = std::max<int64_t>(1, (int64_t{24} << 20) / std::max<int64_t>(1, head_bytes));
  p.schedule = {call.counter,
                call.tile_starts,
                (problem.max_k + C::kKeys - 1) / C::kKeys,
                problem.kv_heads,
                1,
                static_cast<int32_t>(std::min<int64_t>(section, int64_t{problem.batch} * problem.kv_heads))};
  // Longest first, where order is free: of causal calls the first keys are seen by most.
  p.ascending = call.turns == nullptr && problem.window_right >= 0;
  p.lse = call.lse_log2, p.delta = call.delta, p.dq = call.dq, p.turns = call.turns,
  p.query_tiles = query_tiles;
  p.dk = g.d_k.data, p.dv = g.d_v.data;
  p.dk_strides = flash_strides(g.d_k, ragged_k), p.dv_strides = flash_strides(g.d_v, ragged_k);
  if constexpr (C::kSparse) {
    const mr_flash_blocks& blocks = *problem.blocks;
    p.block_q = blocks.block_q, p.block_k = blocks.block_k, p.block_rows = blocks.q_blocks;
    p.block_starts = blocks.row_starts, p.block_columns = blocks.columns;
    p.row_exponents = call.row_exponents, p.column_factors = call.column_factors;
  }
  return p;
}

template <class C>
void launch_flash_backward_as(const FlashBackwardCall& call, const Launch& at) {
  const mr_flash_problem& problem = call.problem;
  const mr_flash_gradients& g = call.gradients;
  const bool ragged = problem.cu_q != nullptr;
  const int32_t query_tiles = (problem.max_q + C::kQueries - 1) / C::kQueries,
                rows = query_tiles * C::kQueries;
  const int64_t heads = int64_t{problem.batch} * problem.heads;
  const FlashRowsParams row_sums{flash_shape(problem),
                                 problem.value_dim,
                                 rows,
                                 call.out.data,
                                 g.d_out.data,
                                 flash_strides(call.out, ragged),
                                 flash_strides(g.d_out, ragged),
                                 call.lse,
                                 call.lse_log2,
                                 call.delta,
                                 call.bounds,
                                 C::kDim,
                                 call.row_exponents};
  const FlashShape& shape = row_sums.shape;
  if (call.bounds != nullptr) launch_flash_bounds<C>(call, shape, at);
  if (rows > 0) {
    const int64_t threads = heads * rows * kFlashRowLanes;
    flash_row_sums_kernel<typename C::Element>
        <<<static_cast<unsigned>((threads + kFlashRowThreads - 1) / kFlashRowThreads), kFlashRowThreads, 0,
           at.stream>>>(row_sums);
    check_launch("flash_row_sums_kernel");
    MILLRACE_CUDA_TRY(
        cudaMemsetAsync(call.dq, 0, static_cast<size_t>(heads * query_tiles * C::kDqFloats) * 4, at.stream));
    if (call.turns != nullptr) {
      MILLRACE_CUDA_TRY(
          cudaMemsetAsync(call.turns, 0, static_cast<size_t>(heads * query_tiles) * 4, at.stream));
    }
  }
  if (problem.max_k > 0) {
    const FlashBackwardParams p = flash_backward_params<C>(call, shape, query_tiles, at.device);
    flash_plan_kernel<<<1, kFlashPlanThreads, 0, at.stream>>>(problem.cu_k, problem.batch, C::kKeys,
                                                              call.counter, call.tile_starts);
    check_launch("flash_plan_kernel");
    const auto kernel = flash_backward_kernel<C>;
    allow_shared_memory(kernel, C::kSharedBytes);
    const int64_t ctas = int64_t{p.schedule.tiles} * problem.batch * problem.kv_heads;
    kernel<<<static_cast<unsigned>(ctas), C::kThreads, C::kSharedBytes, at.stream>>>(p);
    check_launch("flash_backward_kernel");
  }
  if (rows > 0) {
    flash_dq_kernel<C>
        <<<static_cast<unsigned>(heads * query_tiles), 2 * ptx::kWarpgroupThreads, 0, at.stream>>>(
            shape, call.dq, query_tiles, g.d_q.data, flash_strides(g.d_q, ragged), problem.head_dim,
            call.row_exponents, call.column_factors);
    check_launch("flash_dq_kernel");
  }
  if (g.d_sinks != nullptr && problem.sinks != nullptr) {
    flash_dsinks_kernel<<<static_cast<unsigned>(problem.heads), kFlashRowThreads, 0, at.stream>>>(
        shape, call.lse_log2, call.delta, rows, g.d_sinks);
    check_launch("flash_dsinks_kernel");
  }
}

template <class Element, bool kCapped>
void launch_flash_backward_dims(const FlashBackwardCall& call, const Launch& at) {
  if (call.problem.blocks != nullptr) {
    if (flash_backward_dim(call.problem) == 64) {
      launch_flash_backward_as<FlashBackwardConfig<Element, 64, 128, kCapped, true>>(call, at);
    } else {
      launch_flash_backward_as<FlashBackwardConfig<Element, 128, 64, kCapped, true>>(call, at);
    }
    return;
  }
  if (flash_backward_dim(call.problem) == 64) {
    launch_flash_backward_as<FlashBackwardConfig<Element, 64, 128, kCapped>>(call, at);
  } else {
    launch_flash_backward_as<FlashBackwardConfig<Element, 128, 64, kCapped>>(call, at);
  }
}
template <class Element>
void launch_flash_backward_type(const FlashBackwardCall& call, const Launch& at) {
  call.problem.softcap > 0.0f ? launch_flash_backward_dims<Element, true>(call, at)
                              : launch_flash_backward_dims<Element, false>(call, at);
}

}  // namespace millrace::cuda
