// The warp's level of the tile vocabulary: tiles in registers, 16 x 16 and its multiples, whose layout is in
// their type, and what a kernel does with them. A lane is (g, t) = (lane / 4, lane % 4).
//
//     Sums      what a product leaves, float32. v[b][4j + 2r + c] is row 16b + g + 8r, column 8j + 2t + c.
//     Left      the left operand of a product, pairs of 16 bits. v[b][s][i] is row 16b + g + 8 (i % 2),
//               columns 16s + 8 (i / 2) + 2t and + 1. Rounding Sums gives it: no value changes its
//               lane.
//     Right     the right operand, [kRows of K][kColumns]: v[s][n][i] is column 16n + 8 (i / 2) + g,
//               rows 16s + 8 (i % 2) + 2t and + 1.
//
// A warpgroup's product (block.cuh) leaves 64 rows, 16 in each of its warps: Registers<float, 16, N, Sums>.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "millrace/kernels/tile/ptx/approx.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/mma_16bit.cuh"
#include "millrace/kernels/tile/reduce.cuh"

namespace millrace::tile {

namespace ptx = millrace::cuda::ptx;

struct Sums {};
struct Left {};
struct Right {};

template <class Element, int kTileRows, int kTileColumns, class Layout>
struct Registers;

template <int kTileRows, int kTileColumns>
struct Registers<float, kTileRows, kTileColumns, Sums> {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kBands = kRows / 16;
  static_assert(kRows % 16 == 0 && kColumns % 16 == 0);
  float v[kBands][kColumns / 2];
};
template <class Element, int kTileRows, int kTileColumns>
struct Registers<Element, kTileRows, kTileColumns, Left> {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kBands = kRows / 16,
                       kSteps = kColumns / 16;
  static_assert(sizeof(Element) == 2 && kRows % 16 == 0 && kColumns % 16 == 0);
  uint32_t v[kBands][kSteps][4];
};
template <class Element, int kTileRows, int kTileColumns>
struct Registers<Element, kTileRows, kTileColumns, Right> {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kSteps = kRows / 16,
                       kBands = kColumns / 16;
  static_assert(sizeof(Element) == 2 && kRows % 16 == 0 && kColumns % 16 == 0);
  uint32_t v[kSteps][kBands][4];
};
template <int kTileRows, int kTileColumns>
using SumTile = Registers<float, kTileRows, kTileColumns, Sums>;

// A value for each row of a tile: v[b][r] is row 16b + g + 8r, the same in a quad's four lanes.
template <int kTileRows>
struct RowValues {
  float v[kTileRows / 16][2];
};

// ---------------------------------------------------------------- element by element

// f(value, row, column) for every element of this lane, the row and column in the tile.
template <int kRows, int kColumns, class F>
__device__ __forceinline__ void each(SumTile<kRows, kColumns>& x, F&& f) {
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      f(x.v[b][i], 16 * b + g + i / 2 % 2 * 8, i / 4 * 8 + 2 * t + i % 2);
  }
}
template <int kRows, int kColumns>
__device__ __forceinline__ void fill(SumTile<kRows, kColumns>& x, float value) {
  each(x, [&](float& y, int, int) { y = value; });
}
template <int kRows>
__device__ __forceinline__ void fill(RowValues<kRows>& x, float value) {
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) x.v[i / 2][i % 2] = value;
}
// Every row times its value.
template <int kRows, int kColumns>
__device__ __forceinline__ void scale_rows(SumTile<kRows, kColumns>& x, const RowValues<kRows>& by) {
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) x.v[b][i] *= by.v[b][i / 2 % 2];
  }
}
// 2^(scale x - base of the row); 0 for -infinity.
template <int kRows, int kColumns>
__device__ __forceinline__ void exp2_rows(SumTile<kRows, kColumns>& x, float scale,
                                          const RowValues<kRows>& base) {
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      x.v[b][i] = ptx::exp2_approx(fmaf(x.v[b][i], scale, -base.v[b][i / 2 % 2]));
  }
}

// ---------------------------------------------------------------- rows

// quad_max and quad_sum (reduce.cuh): of the lanes that share a row.
template <int kRows>
__device__ __forceinline__ void quad_sum(RowValues<kRows>& x) {
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) x.v[i / 2][i % 2] = quad_sum(x.v[i / 2][i % 2]);
}
template <int kRows, int kColumns>
__device__ __forceinline__ RowValues<kRows> row_max(const SumTile<kRows, kColumns>& x) {
  RowValues<kRows> most;
  fill(most, -INFINITY);
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) most.v[b][i / 2 % 2] = fmaxf(most.v[b][i / 2 % 2], x.v[b][i]);
    most.v[b][0] = quad_max(most.v[b][0]), most.v[b][1] = quad_max(most.v[b][1]);
  }
  return most;
}
// This lane's part of the rows' sums, in two chains a row: quad_sum, once at the end of a loop, makes them
// whole.
template <int kRows, int kColumns>
__device__ __forceinline__ RowValues<kRows> row_sum_parts(const SumTile<kRows, kColumns>& x) {
  RowValues<kRows> sum;
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        chains[j % 2 * 2] += x.v[b][4 * j + 2 * r], chains[j % 2 * 2 + 1] += x.v[b][4 * j + 2 * r + 1];
      }
      sum.v[b][r] = (chains[0] + chains[1]) + (chains[2] + chains[3]);
    }
  }
  return sum;
}
template <int kRows, int kColumns>
__device__ __forceinline__ RowValues<kRows> row_sum(const SumTile<kRows, kColumns>& x) {
  RowValues<kRows> sum = row_sum_parts(x);
  quad_sum(sum);
  return sum;
}

// The online softmax of rows whose scores come tile by tile.
template <int kRows>
struct OnlineSoftmax {
  RowValues<kRows> max, sum;  // max: of scale x; sum: this lane's part

  __device__ __forceinline__ OnlineSoftmax() { fill(max, -INFINITY), fill(sum, 0.0f); }
  // Scores become 2^(scale x - max so far). Returns by what everything summed before is to be multiplied.
  template <int kColumns>
  __device__ __forceinline__ RowValues<kRows> add(SumTile<kRows, kColumns>& scores, float scale) {
    RowValues<kRows> base = row_max(scores), alpha;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      float &old = max.v[i / 2][i % 2], &b = base.v[i / 2][i % 2];
      const float most = fmaxf(old, b * scale);
      b = most == -INFINITY ? 0.0f : most;  // a row that sees nothing yet
      alpha.v[i / 2][i % 2] = ptx::exp2_approx(old - b);
      old = most;
    }
    exp2_rows(scores, scale, base);
    const RowValues<kRows> more = row_sum_parts(scores);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      float& s = sum.v[i / 2][i % 2];
      s = fmaf(s, alpha.v[i / 2][i % 2], more.v[i / 2][i % 2]);
    }
    return alpha;
  }
  // 1 / sum of each row, 0 where a row saw nothing.
  __device__ __forceinline__ RowValues<kRows> inverse_sum() const {
    RowValues<kRows> inverse = sum;
    quad_sum(inverse);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      float& s = inverse.v[i / 2][i % 2];
      s = s > 0.0f ? 1.0f / s : 0.0f;
    }
    return inverse;
  }
};

// ---------------------------------------------------------------- products

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<Element, __half> || std::is_same_v<Element, __nv_bfloat16>);
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
// Sums rounded to the left operand of the next product.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void round_to(Registers<Element, kRows, kColumns, Left>& to,
                                         const SumTile<kRows, kColumns>& from) {
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i)
      to.v[b][i / 4][i % 4] = pack<Element>(from.v[b][2 * i], from.v[b][2 * i + 1]);
  }
}
// to = from^T, 8 x 8 at a time, by exchanges among lanes.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void transpose(Registers<Element, kColumns, kRows, Left>& to,
                                          const Registers<Element, kRows, kColumns, Left>& from) {
#pragma unroll
  for (int b = 0; b < kRows / 16; ++b) {
#pragma unroll
    for (int s = 0; s < kColumns / 16; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to.v[s][b][i % 2 * 2 + i / 2] = ptx::transpose_matrix(from.v[b][s][i]);
    }
  }
}
// d += a b by this warp alone.
template <class Element, int kRows, int kColumns, int kDepth>
__device__ __forceinline__ void gemm(SumTile<kRows, kColumns>& d,
                                     const Registers<Element, kRows, kDepth, Left>& a,
                                     const Registers<Element, kDepth, kColumns, Right>& b) {
#pragma unroll
  for (int s = 0; s < kDepth / 16; ++s) {
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        float(&sums)[4] = *reinterpret_cast<float(*)[4]>(d.v[m] + 4 * n);
        ptx::mma_16bit<Element>(sums, a.v[m][s], b.v[s][n / 2][n % 2 * 2], b.v[s][n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

}  // namespace millrace::tile
