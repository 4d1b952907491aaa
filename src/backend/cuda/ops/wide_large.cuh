// Large items of wide linear products of bf16 weights on Hopper's warpgroup instructions: 128 outputs x 256
// tokens a CTA, where wide_product.cuh has 128 x 128: three quarters of the bytes from L2, and of those that
// go into shared memory.
//
// A segment's sums are one chain, added to the totals at its end (tile_format.cuh). Totals of 64 x 256
// outputs are 128 registers of a thread, so there are sums for half of the tokens at a time: a segment goes
// through the tensor cores twice, with tokens 0-127 and then 128-255. Its weights stay in shared memory
// meanwhile, tokens pass through: two rings. The same bits as any other kernel.
//
// Where the last round of items would leave half of the SMs idle, its items are halved: 128 tokens each.
//
// Nobody waits for outputs: a half's totals are stored while the chain of the other half runs, the second
// half's while the next item's first chain does. Weights are asked for by one thread, tokens by another.
//
// Roofline: 1,024 cycles of the tensor cores for 64 columns of an item. Shared memory: 96 KB read by
// products, 48 KB written. Adding: 128 instructions of each scheduler at the end of a half's chain of 1,536
// cycles (3 x 64 columns).
//
// kLoose: one chain over all columns, without sums beside totals. Its bits differ from every other kernel's:
// it says what equal bits cost, and nothing in the engine uses it.
#pragma once

#include "backend/cuda/ops/wide_product.cuh"

namespace millrace::cuda {

inline constexpr int kLargeTokens = 256, kLargeTiles = 16;  // of an item: tokens, tiles of weights
inline constexpr int kPieceTokens = kLargeTokens / 2;
// Items that run at the same time form a block of so many x as many as SMs are left for, so that both
// operands are read out of L2 again.
inline constexpr int kBandTokens = 2048;

struct LargeLayout {
  static constexpr int kPairBytes = TileFormat<PackedFormat::kBf16>::kPairBytes;
  static constexpr int kHalfBytes = kLargeTiles / 2 * kPairBytes;  // a warpgroup's weights of a pair
  static constexpr int kWeightBytes = 2 * kHalfBytes;
  static constexpr int kTokenBytes = kPieceTokens * ptx::kSwizzleRowBytes;
  static constexpr int kTokenSlots = 8;
  static constexpr int kMostBytes = 232448, kBarrierBytes = 512;
  static constexpr int kWeightSlots = (kMostBytes - kBarrierBytes - kTokenSlots * kTokenBytes) / kWeightBytes;
  static constexpr int kBytes =
      kWeightSlots * kWeightBytes + kTokenSlots * kTokenBytes + 2 * 8 * (kWeightSlots + kTokenSlots);
  static_assert(2 * 8 * (kWeightSlots + kTokenSlots) <= kBarrierBytes && kHalfBytes % 1024 == 0);
};

// One item: a tile of outputs of a part and a tile of tokens.
struct LargeItem {
  int32_t part, first_tile;  // of weights, 8 rows each
  int32_t first_token;
};

struct LargeProblem : WgmmaLinear {
  static constexpr int kOld = 8;   // outputs that are added to at a time: registers
  CUtensorMap token_map, maps[3];  // of the parts
  int32_t whole_items;             // the rest goes in halves of the tokens

  __host__ __device__ int part_items(int part) const {
    return (parts[part].num_tiles + kLargeTiles - 1) / kLargeTiles;
  }
  __host__ __device__ int weight_items() const {
    int n = 0;
    for (int i = 0; i < num_parts; ++i) n += part_items(i);
    return n;
  }
  __host__ __device__ int token_items() const {
    return static_cast<int>((rows + kLargeTokens - 1) / kLargeTokens);
  }
  __host__ __device__ int items() const { return weight_items() * token_items(); }
  __host__ __device__ int half_items() const { return 2 * (items() - whole_items); }

  // Bands of tokens, in each all weights, in turn.
  __device__ LargeItem item(int i) const {
    constexpr int kBand = kBandTokens / kLargeTokens;
    const int all = weight_items(), band = i / (kBand * all), in_band = i - band * kBand * all;
    const int wide = min(kBand, token_items() - band * kBand);
    int n = in_band / wide, part = 0;
    const int m = band * kBand + in_band % wide;
    while (part + 1 < num_parts && n >= part_items(part)) n -= part_items(part++);
    return {part, n * kLargeTiles, m * kLargeTokens};
  }

  __device__ LargeItem half_item(int i) const {
    LargeItem half = item(whole_items + i / 2);
    half.first_token += i % 2 * kPieceTokens;
    return half;
  }

  // sum: of the warp's rows g and g + 8, tokens 8j + 2t and + 1 of the half `piece`.
  __device__ void store(const LargeItem& item, int piece, int warp, int lane, const float (&sum)[64]) const {
    const Part& part = parts[item.part];
    const int g = lane / 4, first = item.first_token + piece * kPieceTokens + 2 * (lane % 4);
    const int left = static_cast<int>(min(rows - first, int64_t{kPieceTokens}));  // tokens from there on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (item.first_tile + 2 * warp + half) * kTileRows + g;
      if (column >= part.rows) continue;
      const float bias = part.bias != nullptr ? part.bias[column] : 0.0f;
      float* to = part.out + int64_t{first} * part.rows + column;
#pragma unroll
      for (int begin = 0; begin < 32; begin += kOld) {
        float old[kOld];  // asked for before anything is stored
#pragma unroll
        for (int i = begin; i < begin + kOld; ++i) {
          const int token = i / 2 * 8 + i % 2;
          old[i - begin] = add && token < left ? to[int64_t{token} * part.rows] : 0.0f;
        }
#pragma unroll
        for (int i = begin; i < begin + kOld; ++i) {
          const int token = i / 2 * 8 + i % 2;
          const float value = sum[i / 2 * 4 + 2 * half + i % 2] + bias;
          if (token < left) to[int64_t{token} * part.rows] = add ? old[i - begin] + value : value;
        }
      }
    }
  }
};

#ifdef MILLRACE_HAS_WGMMA

// Slots are numbered through; number n lies at n % kCount. full completes when its bytes are there, empty
// when every warp that multiplies has read it.
template <int kCount, int kSlotBytes>
struct LargeRing {
  using Cursor = SlotCursor<kCount, kSlotBytes>;
  uint8_t* data;
  uint64_t* barriers;  // full, then empty

  __device__ uint64_t* full(uint32_t n) const { return barriers + n % kCount; }
  __device__ uint8_t* slot(uint32_t n) const { return data + n % kCount * kSlotBytes; }
  __device__ void init() const {
    for (int i = 0; i < kCount; ++i) {
      ptx::barrier_init(barriers + i, 1);
      ptx::barrier_init(barriers + kCount + i, kMultiplyWarps);
    }
  }
  // The slot is free, and `bytes` will come to it.
  __device__ void claim(uint32_t n, uint32_t bytes) const {
    ptx::barrier_wait(barriers + kCount + n % kCount, n / kCount % 2 ^ 1);
    ptx::barrier_arrive_expect(full(n), bytes);
  }
};

struct LargeRings {
  LargeRing<LargeLayout::kWeightSlots, LargeLayout::kWeightBytes> weights;
  LargeRing<LargeLayout::kTokenSlots, LargeLayout::kTokenBytes> tokens;

  __device__ explicit LargeRings(uint8_t* shared) {
    using Layout = LargeLayout;
    tokens.data = shared;
    weights.data = shared + Layout::kTokenSlots * Layout::kTokenBytes;
    tokens.barriers = reinterpret_cast<uint64_t*>(weights.data + Layout::kWeightSlots * Layout::kWeightBytes);
    weights.barriers = tokens.barriers + 2 * Layout::kTokenSlots;
  }
};

// One thread's copies, of the weights or of the tokens of all items.
template <bool kLoose>
struct LargeLoader {
  using Layout = LargeLayout;
  const LargeProblem& p;
  const LargeRings& rings;
  uint32_t n = 0;  // slots filled so far

  __device__ void load_weights() {
    for (int i = blockIdx.x; i < p.whole_items; i += gridDim.x) load_weights(p.item(i));
    for (int i = blockIdx.x; i < p.half_items(); i += gridDim.x) load_weights(p.half_item(i));
  }
  // Of a segment's first half and then of its second.
  __device__ void load_tokens() {
    const int per = kLoose ? 1 : pairs_per_segment(p.pairs);
    for (int i = blockIdx.x; i < p.whole_items; i += gridDim.x) {
      const int tile = p.item(i).first_token / kWgmmaRows;
      for (int begin = 0; begin < p.pairs; begin += per) {
        const int end = min(begin + per, p.pairs);
        load_tokens(tile, begin, end);
        load_tokens(tile + kPieceTokens / kWgmmaRows, begin, end);
      }
    }
    for (int i = blockIdx.x; i < p.half_items(); i += gridDim.x)
      load_tokens(p.half_item(i).first_token / kWgmmaRows, 0, p.pairs);
  }

 private:
  __device__ void load_weights(const LargeItem& item) {
    const CUtensorMap* map = p.maps + item.part;
    for (int pair = 0; pair < p.pairs; ++pair, ++n) {
      rings.weights.claim(n, Layout::kWeightBytes);
      ptx::box_copy(rings.weights.slot(n), map, pair * Layout::kPairBytes, item.first_tile,
                    rings.weights.full(n));
    }
  }
  __device__ void load_tokens(int tile, int begin, int end) {
    for (int pair = begin; pair < end; ++pair, ++n) {
      rings.tokens.claim(n, Layout::kTokenBytes);
      ptx::kilobyte_box_copy(rings.tokens.slot(n), &p.token_map, pair * (kWgmmaTileBytes / 1024), tile,
                             rings.tokens.full(n));
    }
  }
};

struct LargeMultiplier {
  using Layout = LargeLayout;
  const LargeProblem& p;
  const int warp, lane;
  SlotCursor<Layout::kWeightSlots, Layout::kWeightBytes> w;
  SlotCursor<Layout::kTokenSlots, Layout::kTokenBytes> x;
  float total[2][64];  // of the two halves

  __device__ LargeMultiplier(const LargeProblem& problem, const LargeRings& rings, int warp_index,
                             int lane_index)
      : p(problem),
        warp(warp_index),
        lane(lane_index),
        w(rings.weights.data, rings.weights.barriers),
        x(rings.tokens.data, rings.tokens.barriers) {}

  // Half of the products of a slot of weights and one of tokens (or, for 256 tokens, two), left under way.
  template <int kHalf, class Cursor, class Sums>
  __device__ void multiply(Sums& sum, const Cursor& weights, bool first) {
    const uint64_t b = x.operand(0);
    const uint64_t a = weights.operand(static_cast<uint32_t>(warp / kGroupWarps * Layout::kHalfBytes));
    if (kHalf == 0) ptx::wgmma_fence();
#pragma unroll
    for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i)
      ptx::wgmma_bf16(sum, a + 2 * i, b + 2 * i, !first || i > 0);
    ptx::wgmma_commit();
  }

  // The chain of a segment of `count` pairs for one half; kLast: nobody else reads their weights. With `done`
  // (an item, or -1) the other half's totals are complete: they are stored under way. Under a slot's first
  // products the one before is given back. `first` of the item: totals begin here, and not where they are
  // stored, which would have them move between registers in every turn of the loop.
  template <int kPiece, bool kLast>
  __device__ void chain(int count, int done, bool first) {
    float sum[64];
    auto weights = w;
    for (int j = 0; j < count; ++j) {
      if (kPiece == 0) weights.wait();  // the second half has seen it before
      x.wait();
      multiply<0>(sum, weights, j == 0);
      if (j > 0) {
        ptx::wgmma_wait<1>();
        x.release_previous(lane);
        if (kLast) weights.release_previous(lane);
      }
      multiply<1>(sum, weights, false);
      if (done >= 0 && j == min(1, count - 1))
        p.store(p.item(done), 1 - kPiece, warp, lane, total[1 - kPiece]);
      weights.advance();
      x.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::hold_sums(sum);
    x.release_previous(lane);
    if (kLast) {
      weights.release_previous(lane);
      w = weights;
    }
    if (first) {
#pragma unroll
      for (int i = 0; i < 64; ++i) total[kPiece][i] = 0.0f + sum[i];
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) total[kPiece][i] += sum[i];
    }
  }

  __device__ void run() {
    const int per = pairs_per_segment(p.pairs);
    int before = -1;  // the item whose second half has yet to be stored
    for (int i = blockIdx.x; i < p.whole_items; i += gridDim.x) {
      for (int begin = 0; begin < p.pairs; begin += per) {
        const int count = min(per, p.pairs - begin);
        chain<0, false>(count, before, begin == 0);
        before = -1;
        chain<1, true>(count, begin + per >= p.pairs ? i : -1, begin == 0);
      }
      before = i;
    }
    if (before >= 0) p.store(p.item(before), 1, warp, lane, total[1]);
    for (int i = blockIdx.x; i < p.half_items(); i += gridDim.x) {
      for (int begin = 0; begin < p.pairs; begin += per)
        chain<0, true>(min(per, p.pairs - begin), -1, begin == 0);
      p.store(p.half_item(i), 0, warp, lane, total[0]);
    }
  }

  __device__ void run_loose() {
    for (int i = blockIdx.x; i < p.whole_items; i += gridDim.x) {
      const LargeItem item = p.item(i);
      for (int pair = 0; pair < p.pairs; ++pair) {
        w.wait();
        x.wait();
        auto second = x;  // lies behind it: slots are an even number
        second.advance();
        second.wait();
        multiply<0>(total, w, pair == 0);
        if (pair > 0) {
          ptx::wgmma_wait<1>();
          release_loose();
        }
        multiply<1>(total, w, false);
        w.advance();
        second.advance();
        x = second;
      }
      ptx::wgmma_wait<0>();
      ptx::hold_sums(total[0]);
      ptx::hold_sums(total[1]);
      release_loose();
      p.store(item, 0, warp, lane, total[0]);
      p.store(item, 1, warp, lane, total[1]);
    }
  }
  // The pair before.
  __device__ void release_loose() const {
    auto tokens = x;
    tokens.release_previous(lane);
    tokens.slot = tokens.slot == 0 ? Layout::kTokenSlots - 1u : tokens.slot - 1;
    tokens.release_previous(lane);
    w.release_previous(lane);
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <bool kLoose>
__global__ void __launch_bounds__(kThreads, 1) wide_large_kernel(const __grid_constant__ LargeProblem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const LargeRings rings(shared);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / kWarpLanes)),
            lane = threadIdx.x % kWarpLanes;
  if (threadIdx.x == 0) {
    rings.weights.init();
    rings.tokens.init();
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  if (warp < kMultiplyWarps) {
    ptx::more_registers<kConsumerRegisters>();
    ptx::wait_for_previous();
    LargeMultiplier multiplier(p, rings, warp, lane);
    if constexpr (kLoose) {
      multiplier.run_loose();
    } else {
      multiplier.run();
    }
  } else {
    ptx::fewer_registers<kLoaderRegisters>();
    LargeLoader<kLoose> loader{p, rings};
    if (warp == kMultiplyWarps && lane == 0) {
      loader.load_weights();  // which no kernel of a step writes
    } else if (warp == kMultiplyWarps + 1 && lane == 0) {
      ptx::wait_for_previous();
      loader.load_tokens();
    }
  }
#else
  __trap();
#endif
}

template <bool kLoose>
void launch_large(const WgmmaLinear& linear, cudaStream_t stream) {
  LargeProblem p{linear, rows_map_of(linear.x, divide_up(linear.rows, kWgmmaRows), linear.pairs), {}, 0};
  for (int i = 0; i < p.num_parts; ++i)
    p.maps[i] =
        map_of<PackedFormat::kBf16>(p.parts[i].tiles, p.parts[i].num_tiles, p.tile_bytes, kLargeTiles);
  const auto kernel = wide_large_kernel<kLoose>;
  allow_shared_memory(kernel, LargeLayout::kBytes);
  const int ctas = multiprocessors(), rest = p.items() % ctas;
  p.whole_items = kLoose || 2 * rest > ctas ? p.items() : p.items() - rest;
  const int wanted = p.whole_items > p.half_items() ? p.whole_items : p.half_items();
  launch_dependent("wide_large_kernel", kernel, dim3(static_cast<unsigned>(wanted < ctas ? wanted : ctas)),
                   kThreads, LargeLayout::kBytes, stream, p);
}

}  // namespace millrace::cuda
