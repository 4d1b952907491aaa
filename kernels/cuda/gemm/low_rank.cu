// Two kernels. Shrink: a warp has one row of A and eight rows of x at a time; a sum goes by lanes' strides,
// then the butterfly over lanes: its order depends on the number of columns alone. Expand: a thread has one
// output and eight rows, and adds up the rank in order. Rows of a tile with several adapters, or experts, are
// gone over once for each.
//
// Roofline: A and B are read from L2 once for eight rows; beside the product that they update (rank of some
// thousand columns) it is little, and mostly two launches.
#include "kernels/cuda/gemm/low_rank.h"

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kRows = 8;  // of a tile
constexpr int kThreads = 256, kWarps = kThreads / kWarpLanes;
constexpr int64_t kMaxGridY = 65535;  // CUDA's limit; beyond it a CTA takes several turns

// body(update, expert, rows of the tile that have both, as bits) for the rows [row, row + kRows).
template <bool kExperts, class Body>
__device__ inline void each_update(const LowRankUpdates& op, int64_t row, Body&& body) {
  int32_t adapter[kRows], expert[kRows];
  uint32_t left = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool there = row + r < op.rows;
    adapter[r] = there ? op.adapters[kExperts ? (row + r) / op.token_pairs : row + r] - op.first : -1;
    expert[r] = kExperts && there ? op.experts[row + r] : 0;
    if (adapter[r] >= 0 && adapter[r] < op.count && op.updates[adapter[r]].a != nullptr) left |= 1u << r;
  }
  while (left != 0) {  // all threads alike
    int32_t now = -1, of = 0;
    uint32_t same = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if ((left >> r & 1u) == 0) continue;
      if (now < 0) {
        now = adapter[r];
        of = expert[r];
      }
      if (adapter[r] == now && expert[r] == of) same |= 1u << r;
    }
    left &= ~same;
    body(op.updates[now], of, same);
  }
}

// inner[row, k] = A[k, :] . x[row, :]. grid: eight k (x), tiles of rows (y).
template <class Vector, bool kExperts>
__global__ void __launch_bounds__(kThreads) shrink_kernel(const __grid_constant__ LowRankUpdates op) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  const int lane = threadIdx.x % kWarpLanes;
  const int32_t k = static_cast<int32_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  const int64_t vectors = op.cols / kLanes;
  for (int64_t row = int64_t{blockIdx.y} * kRows; row < op.rows; row += int64_t{gridDim.y} * kRows) {
    each_update<kExperts>(op, row, [&](const LowRankUpdates::Update& update, int32_t expert, uint32_t rows) {
      if (k >= update.rank) return;  // a whole warp: nobody waits for it
      const int64_t a_row = int64_t{expert} * update.rank + k;
      const auto* a = reinterpret_cast<const Vector*>(update.a + a_row * op.cols);
      const auto* x = reinterpret_cast<const Vector*>(op.x);
      int64_t from[kRows];  // of each row, in vectors
#pragma unroll
      for (int r = 0; r < kRows; ++r) from[r] = (kExperts ? (row + r) / op.copies : row + r) * vectors;
      float sums[kRows] = {};
      const auto add = [&](int64_t c) {
        const Vector weight = a[c];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if ((rows >> r & 1u) == 0) continue;
          const Vector v = x[from[r] + c];
#pragma unroll
          for (int i = 0; i < kLanes; ++i) {
            sums[r] = fmaf(reinterpret_cast<const float*>(&weight)[i], reinterpret_cast<const float*>(&v)[i],
                           sums[r]);
          }
        }
      };
      if (__popc(rows) == 1) {  // one row has few loads of its own: several steps' are under way at once
#pragma unroll 8
        for (int64_t c = lane; c < vectors; c += kWarpLanes) add(c);
      } else {
#pragma unroll 2
        for (int64_t c = lane; c < vectors; c += kWarpLanes) add(c);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && (rows >> r & 1u) != 0) op.inner[(row + r) * op.max_rank + k] = sum;
      }
    });
  }
}

// y[row, o] += B[o, :] . inner[row, :]. grid: outputs (x), tiles of rows (y).
template <bool kExperts>
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ LowRankUpdates op) {
  constexpr int kHeld = 64;  // of the rank, in shared memory
  __shared__ __align__(16) float held[kHeld][kRows];
  const int64_t output = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t row = int64_t{blockIdx.y} * kRows; row < op.rows; row += int64_t{gridDim.y} * kRows) {
    each_update<kExperts>(op, row, [&](const LowRankUpdates::Update& update, int32_t expert, uint32_t rows) {
      const float* b = update.b + (expert * op.outputs + output) * update.rank;
      const float* inner = op.inner + row * op.max_rank;
      float sums[kRows] = {};
      for (int32_t first = 0; first < update.rank; first += kHeld) {
        const int32_t count = min(kHeld, update.rank - first);
        __syncthreads();  // nobody reads the part before
        for (int i = threadIdx.x; i < count * kRows; i += kThreads) {
          const int r = i % kRows;
          held[i / kRows][r] = (rows >> r & 1u) != 0 ? inner[r * op.max_rank + first + i / kRows] : 0.0f;
        }
        __syncthreads();  // this one is there
        if (output >= op.outputs) continue;
#pragma unroll 4
        for (int32_t k = 0; k < count; ++k) {
          const float weight = b[first + k];
#pragma unroll
          for (int r = 0; r < kRows; ++r) sums[r] = fmaf(weight, held[k][r], sums[r]);
        }
      }
      if (output >= op.outputs) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if ((rows >> r & 1u) != 0) op.y[(row + r) * op.outputs + output] += sums[r];
      }
    });
  }
}

template <bool kExperts>
void launch_as(const LowRankUpdates& op, const Launch& at) {
  const int64_t tiles = (op.rows + kRows - 1) / kRows;
  const auto grid_y = static_cast<unsigned>(tiles < kMaxGridY ? tiles : kMaxGridY);
  const dim3 shrink(static_cast<unsigned>((op.max_rank + kWarps - 1) / kWarps), grid_y);
  // By the number of columns alone: it fixes the order of a sum.
  if (op.cols % 4 == 0) {
    shrink_kernel<float4, kExperts><<<shrink, kThreads, 0, at.stream>>>(op);
  } else {
    shrink_kernel<float, kExperts><<<shrink, kThreads, 0, at.stream>>>(op);
  }
  check_launch("shrink_kernel");
  const dim3 expand(static_cast<unsigned>((op.outputs + kThreads - 1) / kThreads), grid_y);
  expand_kernel<kExperts><<<expand, kThreads, 0, at.stream>>>(op);
  check_launch("expand_kernel");
}

}  // namespace

void launch_low_rank(const LowRankUpdates& op, const Launch& at) {
  if (op.rows == 0 || op.max_rank == 0) return;
  op.experts == nullptr ? launch_as<false>(op, at) : launch_as<true>(op, at);
}

}  // namespace millrace::cuda
