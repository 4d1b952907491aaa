// Products of matrices in shared memory by a CTA of eight warps, in TF32: a warp has sixteen rows of the
// result and some tiles of eight columns. Operands are functions of (row, k) and (k, column), so that one
// matrix serves as itself, transposed or with scaled rows.
#pragma once

#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/async_copy.cuh"
#include "millrace/kernels/tile/ptx/mma_tf32.cuh"

namespace millrace::cuda {

inline constexpr int kProductThreads = 256, kProductWarps = kProductThreads / kWarpLanes;

// A warp's part of a result [kRows][kColumns].
template <int kRows, int kColumns>
struct ProductTiles {
  static constexpr int kWarpRows = kRows / 16;                    // warps one below the other
  static constexpr int kWarpColumns = kProductWarps / kWarpRows;  // beside one another
  static constexpr int kTiles = kColumns / 8 / kWarpColumns;
  static_assert(kWarpRows * kWarpColumns == kProductWarps && kTiles * kWarpColumns * 8 == kColumns);

  float sums[kTiles][4];

  __device__ ProductTiles() { clear(); }
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
    }
  }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpLanes; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
  __device__ static int first_row() { return warp() % kWarpRows * 16; }
  __device__ static int column_part() { return warp() / kWarpRows; }
  __device__ static int first_column() { return column_part() * kTiles * 8; }
  __device__ static int row_of(int e) { return first_row() + lane() / 4 + e / 2 * 8; }
  __device__ static int column_of(int n, int e) { return first_column() + n * 8 + lane() % 4 * 2 + e % 2; }

  // += a b, over kDepth.
  template <int kDepth, class A, class B>
  __device__ void add(const A& a, const B& b) {
    const int row = first_row() + lane() / 4, column = first_column() + lane() / 4, t = lane() % 4;
#pragma unroll 2
    for (int k = 0; k < kDepth; k += 8) {
      const float left[4] = {ptx::round_tf32(a(row, k + t)), ptx::round_tf32(a(row + 8, k + t)),
                             ptx::round_tf32(a(row, k + t + 4)), ptx::round_tf32(a(row + 8, k + t + 4))};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ptx::mma_tf32(sums[n], left, ptx::round_tf32(b(k + t, column + n * 8)),
                      ptx::round_tf32(b(k + t + 4, column + n * 8)));
      }
    }
  }
  // with(row, column, sum)
  template <class With>
  __device__ void each(const With& with) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) with(row_of(e), column_of(n, e), sums[n][e]);
    }
  }
};

// Rows [0, rows) and columns [0, columns) of `from` into a tile [kRows][kColumns], zeros elsewhere. Copies
// are under way until async_wait().
template <int kRows, int kColumns, int kStride>
__device__ void load_tile(float* to, const float* from, int64_t stride, int rows, int columns) {
  static_assert(kColumns % 4 == 0 && kStride % 4 == 0);
  const bool aligned = columns % 4 == 0 && stride % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * (kColumns / 4); i += kProductThreads) {
    const int row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
    float* at = to + row * kStride + column;
    if (aligned && row < rows && column < columns) {
      ptx::async_copy16(at, from + row * stride + column);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      at[j] = row < rows && column + j < columns ? from[row * stride + column + j] : 0.0f;
  }
}

}  // namespace millrace::cuda
