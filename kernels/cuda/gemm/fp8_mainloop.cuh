// The mainloop of e4m3 products with a scale for every 1 x 128 elements of a and 128 x 128 of b (DeepSeek
// V3's recipe), which dense_fp8.cu and grouped_fp8.cu share: the tensor cores sum 128 of K, whose sums are
// multiplied with both scales and added to float32 totals. (Hopper's e4m3 products keep some 14 bits of a
// sum: chains of 128 bound what that costs.)
//
// Scales come from memory as they lie, rows of K / 128 numbers: lane t of the four that have the same rows
// loads those of block 4i + t, four to eight blocks ahead, and the others take them from it.
#pragma once

#include "kernels/cuda/gemm/dense_launch.cuh"

namespace millrace::cuda {

// Which rows and columns a warpgroup has of a CTA's tile of 128 x kN.
//   Fp8Tile        128 x 128: 64 rows and all columns, the sums of two blocks in turn
//   Fp8WideTile    128 x 256: all rows in two waves of 64, 128 columns
template <int kCluster>
struct Fp8Tile : DenseTile<ptx::WgmmaE4m3, 128, 128, kCluster, false, false> {
  static constexpr int kWaves = 1;
};
template <int kCluster>
struct Fp8WideTile : DenseTile<ptx::WgmmaE4m3, 128, 256, kCluster, false, false> {
  static constexpr int kWaves = 2;
  static constexpr int kWarpgroupColumns = 128, kSums = 64;
  static constexpr bool kTakesGates = false;
};

#ifdef MILLRACE_HAS_WGMMA

// The factors of a thread's sums: its rows' scales times its columns'.
template <int kWaves>
struct Fp8Scales {
  static constexpr int kRows = 2 * kWaves;  // row + {0, 8, 64, 72}
  const float *rows, *columns;
  int64_t stride;
  int32_t row, last_row, blocks, lane;
  float now[kRows + 1], next[kRows + 1];

  // rows: of a's first row, `stride` numbers apart; row: this lane's, and the matrix's last: rows outside
  // multiply zeros, any scale will do. columns: [blocks] of the warpgroup's columns.
  __device__ Fp8Scales(const float* a_scales, int64_t a_stride, int32_t first, int32_t last,
                       const float* b_scales, int32_t k_blocks, int lane_index)
      : rows(a_scales),
        columns(b_scales),
        stride(a_stride),
        row(first),
        last_row(last),
        blocks(k_blocks),
        lane(lane_index) {
    load(0, now);
    load(4, next);
  }
  __device__ void load(int32_t block, float (&to)[kRows + 1]) const {
    const int32_t at = min(block + lane % 4, blocks - 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) to[i] = rows[min(row + i % 2 * 8 + i / 2 * 64, last_row) * stride + at];
    to[kRows] = columns[at];
  }
  // Of `block`; calls are in the order of blocks.
  __device__ void get(int32_t block, float (&factors)[kRows]) {
    const float column = __shfl_sync(0xffffffffu, now[kRows], block % 4, 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) factors[i] = __shfl_sync(0xffffffffu, now[i], block % 4, 4) * column;
    if (block % 4 == 3) {
#pragma unroll
      for (int i = 0; i <= kRows; ++i) now[i] = next[i];
      load(block + 5, next);
    }
  }
};

// The four products of a stage, under way: 64 rows from 64 * wave on, 128 columns from 128 * part on.
template <class Tile>
__device__ inline void multiply_fp8(const DenseCursor<Tile>& at, int wave, int part, float (&sum)[64]) {
  const uint8_t* stage = at.shared.stages + at.stage * Tile::kStageBytes;
  const uint64_t a = ptx::wgmma_operand(stage + wave * 64 * 128),
                 b = ptx::wgmma_operand(stage + Tile::kABytes + part * 128 * 128);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::DenseWgmma<ptx::WgmmaE4m3, 128, false, false>::multiply(sum, a + i * 2, b + i * 2, i > 0);
  ptx::wgmma_commit();
}
__device__ inline void promote(const float (&sum)[64], float low, float high, float (&total)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) total[i] = fmaf(sum[i], i % 4 < 2 ? low : high, total[i]);
}

// total[kWaves][64] of a tile, k_blocks stages of the ring.
template <class Tile>
__device__ __forceinline__ void multiply_tile(DenseCursor<Tile>& at, Fp8Scales<Tile::kWaves>& scales,
                                              int32_t k_blocks, bool leader,
                                              float (&total)[Tile::kWaves][64]) {
#pragma unroll
  for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
    for (int i = 0; i < 64; ++i) total[wave][i] = 0.0f;
  }
  float factors[2 * Tile::kWaves] = {};
  if constexpr (Tile::kWaves == 2) {
    // One warpgroup adds while the other multiplies.
    for (int32_t block = 0; block < k_blocks; ++block, at.advance()) {
      float sum[64];
      at.wait();
      multiply_fp8(at, 0, at.warpgroup, sum);
      scales.get(block, factors);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(sum);
      promote(sum, factors[0], factors[1], total[0]);
      multiply_fp8(at, 1, at.warpgroup, sum);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(sum);
      if (leader) at.release(at.stage);
      promote(sum, factors[2], factors[3], total[1]);
    }
  } else {
    // A block's sums are added under the products of the next.
    float even[64], odd[64];
    uint32_t before = 0;
    const auto begin = [&](float(&sum)[64]) __attribute__((always_inline)) {
      at.wait();
      multiply_fp8(at, at.warpgroup, 0, sum);
    };
    const auto add = [&](float(&sum)[64]) __attribute__((always_inline)) {
      ptx::fence_registers(sum);
      if (leader) at.release(before);
      promote(sum, factors[0], factors[1], total[0]);
    };
    const auto next = [&](int32_t block) __attribute__((always_inline)) {
      scales.get(block, factors);
      before = at.stage;
      at.advance();
    };
    begin(even);
    int32_t block = 0;
    for (; block + 2 < k_blocks; block += 2) {
      next(block);
      begin(odd);
      ptx::wgmma_wait<1>();
      add(even);
      next(block + 1);
      begin(even);
      ptx::wgmma_wait<1>();
      add(odd);
    }
    next(block);
    if (block + 1 < k_blocks) {
      begin(odd);
      ptx::wgmma_wait<1>();
      add(even);
      next(block + 1);
      ptx::wgmma_wait<0>();
      add(odd);
    } else {
      ptx::wgmma_wait<0>();
      add(even);
    }
  }
}

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda
