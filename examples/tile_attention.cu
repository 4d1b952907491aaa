// Attention forward of bf16, heads of 128, causal or full, in the tile vocabulary. A block has 128 queries of
// a head. A producer thread loads tiles of 128 keys and values through two rings; two consumer warpgroups of
// 64 queries multiply Q K^T of the next tile before P V of this one, under which the softmax runs, and take
// turns to begin products.
// nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a tile_attention.cu; ./a.out [tokens] [heads]
#include <cstdio>
#include <cstdlib>
#include <millrace/kernels/tile/tile.cuh>

namespace tile = millrace::tile;
using Bf16 = __nv_bfloat16;
constexpr int kTile = 128, kDim = 128, kStages = 2;
constexpr float kScaleLog2 = 0.08838835f * 1.44269504f;  // 1 / sqrt(kDim), of base 2
using Tile = tile::Shared<Bf16, kTile, kDim>;
struct Block {
  tile::Ring<Tile, 1> q;
  tile::Ring<Tile, kStages> k, v;
  tile::Shared<Bf16, 64, 64> out[2][2];  // of each consumer, in turn
};
struct Params {
  CUtensorMap map[4];     // of q, k, v, out: [heads * tokens][kDim]
  tile::TileOrder order;  // tiles of queries x heads
  bool causal;
  // Tiles of keys that a tile of queries sees.
  __device__ int tiles(int tile) const { return causal ? tile + 1 : order.m_tiles; }
};

__device__ void produce(const Params& p, Block& block) {
  tile::Cursor<1> at_q;
  tile::Cursor<kStages> at_k, at_v;
  const auto load = [](auto& ring, auto& at, const CUtensorMap& map, int row) {
    tile::load_async(ring.acquire(at), map, row, 0, ring.full(at));
    ++at;
  };
  tile::each_tile(p.order, [&](auto item) {
    const int tile = p.order.m_tiles - 1 - item.m,
              head = item.n * p.order.m_tiles * kTile;  // the longest first
    load(block.q, at_q, p.map[0], head + tile * kTile);
    for (int i = p.tiles(tile) - 1, last = i; i >= 0; --i) {
      load(block.k, at_k, p.map[1], head + i * kTile);
      if (i < last) load(block.v, at_v, p.map[2], head + (i + 1) * kTile);
    }
    load(block.v, at_v, p.map[2], head);
  });
}

__device__ void consume(const Params& p, Block& block, int warpgroup) {
  const tile::Turns<1> turns(warpgroup);
  tile::Cursor<1> at_q;
  tile::Cursor<kStages> at_k, at_v;
  tile::each_tile(p.order, [&](auto item) {
    const int tile = p.order.m_tiles - 1 - item.m, last = p.tiles(tile) - 1;
    const int row = 64 * warpgroup + 16 * tile::warpgroup_warp();  // of this warp, in the tile
    tile::OnlineSoftmax<16> softmax;
    tile::SumTile<16, kTile> scores;
    tile::SumTile<16, kDim> out;
    tile::Registers<Bf16, 16, kTile, tile::Left> probs;
    tile::fill(out, 0.0f);
    const Tile& q = block.q.wait(at_q);
    tile::gemm_abt(scores, q, 64 * warpgroup, block.k.wait(at_k), false);
    tile::gemm_wait<0>(scores);
    block.k.leave(at_k);
    if (p.causal) {  // the first tile is the one on the diagonal
      tile::each(scores, [&](float& s, int r, int column) { s = column > row + r ? -INFINITY : s; });
    }
    softmax.add(scores, kScaleLog2);
    tile::round_to(probs, scores);
    for (int i = last - 1; i >= 0; --i) {
      const Tile& k = block.k.wait(at_k);
      turns.wait();
      tile::hold(out);
      tile::gemm_abt(scores, q, 64 * warpgroup, k, false);
      tile::gemm_ab(out, probs, block.v.wait(at_v));
      turns.pass();
      tile::gemm_wait<1>(scores);
      block.k.leave(at_k);
      const tile::RowValues<16> alpha = softmax.add(scores, kScaleLog2);
      tile::hold(scores);
      tile::gemm_wait<0>(out, probs);
      block.v.leave(at_v);
      tile::round_to(probs, scores);
      tile::scale_rows(out, alpha);
    }
    block.q.leave(at_q);
    tile::hold(out);
    tile::gemm_ab(out, probs, block.v.wait(at_v));
    tile::gemm_wait<0>(out, probs);
    block.v.leave(at_v);
    tile::scale_rows(out, softmax.inverse_sum());
    const int first = (item.n * p.order.m_tiles + tile) * kTile + 64 * warpgroup;
    tile::store_rows<3>(p.map[3], first, 0, out, block.out[warpgroup]);
  });
  if (tile::warpgroup_leader()) tile::store_wait();
}

__global__ void __launch_bounds__(384, 1) attention_kernel(const __grid_constant__ Params p) {
  Block& block = tile::block_memory<Block>();
  if (threadIdx.x == 0) block.q.init(2), block.k.init(2), block.v.init(2);
  tile::sync_cluster();
  if (const int warpgroup = tile::warpgroup_index(); warpgroup < 2) {
    tile::take_registers<240>();
    consume(p, block, warpgroup);
  } else {
    tile::give_registers<24>();
    if (tile::warpgroup_leader()) produce(p, block);
  }
}

// Query `row` of q, k, v [tokens][kDim] in double: how far out's row is off, of its size.
double error_of(Bf16* const (&x)[4], int tokens, int row, bool causal) {
  const int keys = causal ? row % tokens + 1 : tokens, head = row / tokens * tokens;
  double sum = 0, e = 0, size = 0, out[kDim] = {};
  for (int key = head; key < head + keys; ++key) {
    double score = 0;
    for (int d = 0; d < kDim; ++d) score += float{x[0][row * kDim + d]} * float{x[1][key * kDim + d]};
    const double weight = exp2(score * kScaleLog2);
    sum += weight;
    for (int d = 0; d < kDim; ++d) out[d] += weight * float{x[2][key * kDim + d]};
  }
  for (int d = 0; d < kDim; ++d)
    size += pow(out[d], 2), e += pow(out[d] - sum * float{x[3][row * kDim + d]}, 2);
  return sqrt(e / size);
}

int main(int argc, char** argv) {
  const int tokens = argc > 1 ? std::atoi(argv[1]) : 16384, heads = argc > 2 ? std::atoi(argv[2]) : 16;
  if (tokens <= 0 || tokens % kTile != 0) return std::puts("tokens: a multiple of 128"), 1;
  Bf16* x[4];  // q, k, v, out: [heads][tokens][kDim]
  Params p{{}, {tokens / kTile, heads, tokens / kTile}, false};
  for (int i = 0; i < 4; ++i) {
    const int64_t rows = int64_t{heads} * tokens;
    if (cudaMallocManaged(&x[i], sizeof(Bf16) * rows * kDim) != cudaSuccess) return std::puts("no memory"), 1;
    for (int64_t j = 0; j < rows * kDim; ++j) x[i][j] = static_cast<float>(std::rand() % 512 - 256) / 128;
    if (!tile::make_map(p.map[i], x[i], rows, kDim, kDim, i == 3 ? 64 : kTile)) return std::puts("no map"), 1;
  }
  for (const bool causal : {false, true}) {
    p.causal = causal;
    const int blocks = tile::persistent_blocks(p.order.count()), bytes = tile::block_memory_bytes<Block>;
    const float ms =
        tile::milliseconds([&] { tile::launch(attention_kernel, blocks, 384, bytes, 1, nullptr, p); }, 5);
    if (ms <= 0) return std::puts(cudaGetErrorString(cudaGetLastError())), 1;
    double error = 0;
    for (int i = 0; i < 40; ++i) error += error_of(x, tokens, rand() % (heads * tokens), causal) / 40;
    const double flops = 4.0 * heads * tokens * tokens * kDim / (causal ? 2 : 1);
    std::printf("%s, %d tokens: %.0f TFLOP/s, error %.4f\n", causal ? "causal" : "full", tokens,
                flops / ms * 1e-9, error);
    if (!(error < 0.01)) return 1;
  }
  return 0;
}
