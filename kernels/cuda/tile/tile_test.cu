// The tile vocabulary (include/millrace/kernels/tile) piece by piece against loops on the host: what the
// examples and kernels do not use alone.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/cuda/gpu_test.h"
#include "millrace/kernels/tile/tile.cuh"

namespace millrace::cuda {
namespace {

using Bf16 = __nv_bfloat16;
constexpr int kRows = 32, kColumns = 64, kDepth = 64;

// One warp: d [kRows][kColumns] = a [kRows][kDepth] b [kColumns][kDepth]^T, its rows' maxima and sums, its
// softmax, and a^T as it lies in registers.
struct WarpOut {
  float d[kRows][kColumns], max[kRows], sum[kRows], softmax[kRows][kColumns];
  Bf16 transposed[kDepth][kRows];
};
__global__ void warp_tiles_kernel(const Bf16* a, const Bf16* b, WarpOut* out) {
  __shared__ tile::Shared<Bf16, kRows, kDepth> left;
  __shared__ tile::Shared<Bf16, kColumns, kDepth> right;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kDepth; i += 32)
    *reinterpret_cast<Bf16*>(left.address(0, i / kDepth, i % kDepth * 2)) = a[i];
  for (int i = static_cast<int>(threadIdx.x); i < kColumns * kDepth; i += 32)
    *reinterpret_cast<Bf16*>(right.address(0, i / kDepth, i % kDepth * 2)) = b[i];
  __syncwarp();
  tile::Registers<Bf16, kRows, kDepth, tile::Left> x;
  tile::Registers<Bf16, kDepth, kColumns, tile::Right> y;
  tile::load(x, left, 0, 0);
  tile::load(y, right, 0, 0);
  tile::SumTile<kRows, kColumns> d;
  tile::fill(d, 0.0f);
  tile::gemm(d, x, y);
  const tile::RowValues<kRows> max = tile::row_max(d), sum = tile::row_sum(d);
  tile::each(d, [&](float& v, int row, int column) { out->d[row][column] = v; });
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  for (int i = 0; i < kRows / 8; ++i) {
    out->max[8 * i + g] = max.v[i / 2][i % 2];
    out->sum[8 * i + g] = sum.v[i / 2][i % 2];
  }
  // In two halves, as scores come tile by tile.
  tile::OnlineSoftmax<kRows> softmax;
  tile::SumTile<kRows, kColumns / 2> half[2];
  for (int h = 0; h < 2; ++h) {
    for (int band = 0; band < kRows / 16; ++band) {
      for (int i = 0; i < kColumns / 4; ++i) half[h].v[band][i] = d.v[band][h * kColumns / 4 + i];
    }
    const tile::RowValues<kRows> alpha = softmax.add(half[h], 0.5f);
    if (h == 1) tile::scale_rows(half[0], alpha);
  }
  for (int h = 0; h < 2; ++h) {
    tile::scale_rows(half[h], softmax.inverse_sum());
    tile::each(half[h],
               [&](float& v, int row, int column) { out->softmax[row][h * kColumns / 2 + column] = v; });
  }
  tile::Registers<Bf16, kDepth, kRows, tile::Left> turned;
  tile::transpose(turned, x);
  for (int band = 0; band < kDepth / 16; ++band) {
    for (int s = 0; s < kRows / 16; ++s) {
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * band + g + 8 * (i % 2), column = 16 * s + 8 * (i / 2) + 2 * t;
        *reinterpret_cast<uint32_t*>(&out->transposed[row][column]) = turned.v[band][s][i];
      }
    }
  }
}

TEST(Tile, WarpAgainstLoops) {
  SKIP_WITHOUT_GPU("tiles were not compared with loops");
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Bf16 *a, *b;
  WarpOut* out;
  ASSERT_EQ(cudaMallocManaged(&a, kRows * kDepth * sizeof(Bf16)), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&b, kColumns * kDepth * sizeof(Bf16)), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&out, sizeof(WarpOut)), cudaSuccess);
  for (int i = 0; i < kRows * kDepth; ++i) a[i] = normal(random);
  for (int i = 0; i < kColumns * kDepth; ++i) b[i] = normal(random);
  warp_tiles_kernel<<<1, 32>>>(a, b, out);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int row = 0; row < kRows; ++row) {
    double d[kColumns], max = -INFINITY, sum = 0, all = 0;
    for (int column = 0; column < kColumns; ++column) {
      d[column] = 0;
      for (int k = 0; k < kDepth; ++k)
        d[column] += static_cast<double>(static_cast<float>(a[row * kDepth + k])) *
                     static_cast<float>(b[column * kDepth + k]);
      max = std::max(max, d[column]), sum += d[column];
      EXPECT_NEAR(out->d[row][column], d[column], 1e-4);
    }
    EXPECT_NEAR(out->max[row], max, 1e-4);
    EXPECT_NEAR(out->sum[row], sum, 1e-3);
    for (const double x : d) all += std::exp2(0.5 * (x - max));
    for (int column = 0; column < kColumns; ++column)
      EXPECT_NEAR(out->softmax[row][column], std::exp2(0.5 * (d[column] - max)) / all, 1e-5);
    for (int k = 0; k < kDepth; ++k)
      EXPECT_EQ(static_cast<float>(out->transposed[k][row]), static_cast<float>(a[row * kDepth + k]));
  }
  for (void* p : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(out)}) cudaFree(p);
}

// Rounds in which each block reads what its neighbour wrote in the round before.
__global__ void grid_barrier_kernel(uint32_t* count, int* values, int rounds) {
  const tile::GridBarrier barrier{count};
  for (int round = 1; round <= rounds; ++round) {
    const int neighbour = static_cast<int>((blockIdx.x + 1) % gridDim.x);
    const int seen = *const_cast<volatile int*>(values + neighbour);
    barrier.sync(static_cast<uint32_t>(2 * round - 1));
    if (threadIdx.x == 0) values[blockIdx.x] = seen + 1;
    barrier.sync(static_cast<uint32_t>(2 * round));
  }
}
// How often each item was taken.
__global__ void queue_kernel(int* counter, int* taken, int items) {
  const tile::WorkQueue queue{counter};
  for (int i = queue.first(); i < items; i = queue.next()) atomicAdd(taken + i, 1);
}

TEST(Tile, GridBarrierAndQueue) {
  SKIP_WITHOUT_GPU("tiles were not compared with loops");
  constexpr int kBlocks = 64, kRounds = 50, kItems = 1000;
  int* memory;
  ASSERT_EQ(cudaMallocManaged(&memory, (2 + kBlocks + kItems) * sizeof(int)), cudaSuccess);
  for (int i = 0; i < 2 + kBlocks + kItems; ++i) memory[i] = 0;
  int *values = memory + 2, *taken = values + kBlocks;
  grid_barrier_kernel<<<kBlocks, 64>>>(reinterpret_cast<uint32_t*>(memory), values, kRounds);
  queue_kernel<<<kBlocks, 1>>>(memory + 1, taken, kItems);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < kBlocks; ++i) EXPECT_EQ(values[i], kRounds) << i;
  for (int i = 0; i < kItems; ++i) EXPECT_EQ(taken[i], 1) << i;
  cudaFree(memory);
}

TEST(Tile, OrderHasEveryTileOnce) {
  for (const auto& [m, n, group] : {std::tuple{1, 1, 8}, {7, 3, 4}, {16, 5, 8}, {33, 2, 16}}) {
    const tile::TileOrder order{m, n, group};
    std::vector<int> seen(static_cast<size_t>(m * n));
    for (int i = 0; i < order.count(); ++i) ++seen[static_cast<size_t>(order.at(i).m * n + order.at(i).n)];
    EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(m * n), 1)) << m << " x " << n;
  }
}

}  // namespace
}  // namespace millrace::cuda
