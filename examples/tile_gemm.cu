// c [m, n] = a [m, k] b [n, k]^T of bf16 in the tile vocabulary: clusters of two blocks, which share rows of
// b; a block has 128 x 256 outputs. nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a tile_gemm.cu
#include <cstdio>
#include <cstdlib>
#include <millrace/kernels/tile/tile.cuh>

namespace tile = millrace::tile;
using Bf16 = __nv_bfloat16;
constexpr int kM = 128, kN = 256, kK = 64, kStages = 4, kCtas = 2;
struct Stage {
  tile::Shared<Bf16, kM, kK> a;
  tile::Shared<Bf16, kN, kK> b;
};
struct Block {
  tile::Ring<Stage, kStages, kCtas> ring;
  tile::Shared<Bf16, 64, 64> out[2][2];  // of each consumer, in turn
};

__global__ void __launch_bounds__(384, 1)
    gemm_kernel(const __grid_constant__ tile::Maps<3> maps, tile::TileOrder order, int k) {
  Block& block = tile::block_memory<Block>();
  if (threadIdx.x == 0) block.ring.init(2);  // consumers
  tile::sync_cluster<kCtas>();
  const int warpgroup = tile::warpgroup_index(), rank = blockIdx.x % kCtas, leader = threadIdx.x % 128 == 0;
  tile::Cursor<kStages> at, before;
  if (warpgroup == 2) {
    tile::give_registers<24>();
    tile::each_tile<kCtas>(order, [&](auto t) {
      for (int i = 0; leader && i < k; i += kK, ++at) {
        Stage& stage = block.ring.acquire(at);
        tile::load_async(stage.a, maps[0], (t.m * kCtas + rank) * kM, i, block.ring.full(at));
        tile::load_async_shared<kCtas>(stage.b, maps[1], t.n * kN, i, rank, block.ring.full(at));
      }
    });
  } else {
    tile::take_registers<240>();
    tile::each_tile<kCtas>(order, [&](auto t) {
      tile::SumTile<16, kN> sum;
      for (int i = 0; i < k; i += kK, before = at, ++at) {
        const Stage& stage = block.ring.wait(at);
        tile::gemm_abt(sum, stage.a, 64 * warpgroup, stage.b, i > 0);
        tile::gemm_wait<1>();
        if (leader && i > 0) block.ring.release(before);
      }
      tile::gemm_wait<0>(sum);
      if (leader) block.ring.release(before);
      tile::store_rows<1>(maps[2], (t.m * kCtas + rank) * kM + 64 * warpgroup, t.n * kN, sum,
                          block.out[warpgroup]);
    });
    if (leader) tile::store_wait();
  }
  tile::leave_cluster<kCtas>();
}

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 4096;  // m and k too
  Bf16* x[3];                                          // a, b, c
  tile::Maps<3> maps;
  for (int i = 0; i < 3; ++i) {
    cudaMallocManaged(&x[i], sizeof(Bf16) * n * n);
    if (!tile::make_map(maps[i], x[i], n, n, n, i == 2 ? 64 : 128)) return std::puts("no memory, no map"), 1;
    for (int64_t j = 0; j < int64_t{n} * n; ++j) x[i][j] = static_cast<float>(std::rand() % 256 - 128) / 128;
  }
  const tile::TileOrder order{(n + kM * kCtas - 1) / (kM * kCtas), (n + kN - 1) / kN, 8};
  const int blocks = tile::persistent_blocks(order.count(), kCtas), bytes = tile::block_memory_bytes<Block>;
  const auto run = [&] { tile::launch(gemm_kernel, blocks, 384, bytes, kCtas, nullptr, maps, order, n); };
  const float ms = tile::milliseconds(run, 10);
  if (ms <= 0) return std::puts(cudaGetErrorString(cudaGetLastError())), 1;
  double error = 0, sum;
  for (int i = 0; i < 2000; ++i) {  // outputs against sums in double
    const int64_t row = std::rand() % n, column = std::rand() % n;
    sum = 0;
    for (int j = 0; j < n; ++j) sum += float{x[0][row * n + j]} * float{x[1][column * n + j]};
    error += pow(float{x[2][row * n + column]} - sum, 2) / 2000 / n;  // products are of the order of 1
  }
  std::printf("%d^3: %.0f TFLOP/s, error %.6f\n", n, 2e-9 * n * n * n / ms, sqrt(error));
  return sqrt(error) < 0.001 ? 0 : 1;
}
