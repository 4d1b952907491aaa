// Large items of wide linear products on Hopper's warpgroup instructions: 128 outputs x 256 tokens a CTA,
// where wide_product.cuh has 128 x 128. All SMs' operands come out of L2, which gives each some 39 bytes a
// cycle (what 128 x 128 items reach); a product of m x n outputs asks for 4,096 (m + n) / (m n) at the tensor
// cores' rate: 64 for 128 x 128, 48 for 128 x 256, 40 and 32 where two CTAs share weights or tokens (a
// cluster, each brings half of them to both).
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
// products, 48 KB written (bf16): 1,125 cycles of 128 bytes, so 91% of the tensor cores at best. Adding:
// 128 instructions of each scheduler at the end of a half's chain of 1,536 cycles (3 x 64 columns), under
// the other warpgroup's products.
//
// kLoose: one chain over all columns, without sums beside totals. Its bits differ from every other kernel's:
// it says what equal bits cost, and nothing in the engine uses it.
#pragma once

#include "backend/cuda/ops/wide_product.cuh"

namespace millrace::cuda {

enum class LargeShare { kNothing, kTokens, kWeights };

inline constexpr int kLargeTokens = 256, kLargeTiles = 16;  // of an item: tokens, tiles of weights
inline constexpr int kPieceTokens = kLargeTokens / 2;
inline constexpr int kLargeRegisters = 240, kLargeLoaderRegisters = 24;
static_assert(kConsumers * kLargeRegisters + kLargeLoaderRegisters == 3 * 168);
// Items that run at the same time form a block of so many x as many as SMs are left for, so that both
// operands are read out of L2 again.
inline constexpr int kBandTokens = 2048;

template <PackedFormat kFormat>
struct LargeLayout {
  static constexpr int kPairBytes = TileFormat<kFormat>::kPairBytes;
  static constexpr int kHalfBytes = kLargeTiles / 2 * kPairBytes;  // a warpgroup's weights of a pair
  static constexpr int kWeightBytes = (2 * kHalfBytes + 1023) / 1024 * 1024;
  static constexpr int kTokenBytes = kPieceTokens * ptx::kSwizzleRowBytes;
  static constexpr int kTokenSlots = 8;
  static constexpr int kMostBytes = 232448, kBarrierBytes = 512;
  static constexpr int kWeightSlots =
      (kMostBytes - kBarrierBytes - kTokenSlots * kTokenBytes) / kWeightBytes < 12
          ? (kMostBytes - kBarrierBytes - kTokenSlots * kTokenBytes) / kWeightBytes
          : 12;
  static constexpr int kBytes =
      kWeightSlots * kWeightBytes + kTokenSlots * kTokenBytes + 2 * 8 * (kWeightSlots + kTokenSlots);
  static_assert(2 * 8 * (kWeightSlots + kTokenSlots) <= kBarrierBytes && kHalfBytes % 128 == 0);
};

// One item: a tile of outputs of a part and a tile of tokens.
struct LargeItem {
  int32_t part, first_tile;  // of weights, 8 rows each
  int32_t first_token;
};

template <PackedFormat kFormat, LargeShare kShare>
struct LargeProblem : WgmmaLinear {
  using Format = TileFormat<kFormat>;
  using Layout = LargeLayout<kFormat>;
  static constexpr bool kDirect = kFormat == PackedFormat::kBf16;
  static constexpr int kCtas = kShare == LargeShare::kNothing ? 1 : 2;
  static constexpr int kOld = kDirect ? 8 : 4;  // outputs that are added to at a time: registers
  static constexpr bool kHalves = kDirect;      // of the last round: registers again
  // What a cluster does at a time.
  static constexpr int kUnitTiles = kLargeTiles * (kShare == LargeShare::kTokens ? 2 : 1);
  static constexpr int kUnitTokens = kLargeTokens * (kShare == LargeShare::kWeights ? 2 : 1);
  CUtensorMap token_map, maps[3];  // of the parts
  int32_t whole_units;             // the rest goes in halves of the tokens

  __host__ __device__ int part_units(int part) const {
    return (parts[part].num_tiles + kUnitTiles - 1) / kUnitTiles;
  }
  __host__ __device__ int weight_units() const {
    int n = 0;
    for (int i = 0; i < num_parts; ++i) n += part_units(i);
    return n;
  }
  __host__ __device__ int token_units() const {
    return static_cast<int>((rows + kUnitTokens - 1) / kUnitTokens);
  }
  __host__ __device__ int units() const { return weight_units() * token_units(); }
  __host__ __device__ int half_units() const { return 2 * (units() - whole_units); }

  // Unit i, of which this is CTA `rank`: bands of tokens, in each all weights, in turn.
  __device__ LargeItem item(int i, int rank) const {
    constexpr int kBand = kBandTokens / kUnitTokens;
    const int all = weight_units(), band = i / (kBand * all), in_band = i - band * kBand * all;
    const int wide = min(kBand, token_units() - band * kBand);
    int n = in_band / wide, part = 0;
    const int m = band * kBand + in_band % wide;
    while (part + 1 < num_parts && n >= part_units(part)) n -= part_units(part++);
    return {part, n * kUnitTiles + (kShare == LargeShare::kTokens ? rank * kLargeTiles : 0),
            m * kUnitTokens + (kShare == LargeShare::kWeights ? rank * kLargeTokens : 0)};
  }

  __device__ LargeItem half_item(int i, int rank) const {
    LargeItem half = item(whole_units + i / 2, rank);
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
          const float value = sum[i / 2 * 4 + 2 * half + i % 2] * Format::kUnscale + bias;
          if (token < left) to[int64_t{token} * part.rows] = add ? old[i - begin] + value : value;
        }
      }
    }
  }
};

#ifdef MILLRACE_HAS_WGMMA

// Slots are numbered through; number n lies at n % kCount. full completes when its bytes are there, empty
// when every warp that multiplies has read it: of both CTAs where they share what is in it.
template <int kCount, int kSlotBytes, bool kShared>
struct LargeRing {
  uint8_t* data;
  uint64_t* barriers;  // full, then empty

  __device__ uint64_t* full(uint32_t n) const { return barriers + n % kCount; }
  __device__ uint64_t* empty(uint32_t n) const { return barriers + kCount + n % kCount; }
  __device__ uint8_t* slot(uint32_t n) const { return data + n % kCount * kSlotBytes; }
  __device__ void init() const {
    for (int i = 0; i < kCount; ++i) {
      ptx::barrier_init(barriers + i, 1);
      ptx::barrier_init(barriers + kCount + i, kShared ? 2 * kMultiplyWarps : kMultiplyWarps);
    }
  }
  __device__ void wait_full(uint32_t n) const { ptx::barrier_wait(full(n), n / kCount % 2); }
  // The slot is free (in both CTAs), and `bytes` will come to it.
  __device__ void claim(uint32_t n, uint32_t bytes) const {
    if constexpr (kShared) {
      ptx::barrier_wait_cluster(empty(n), n / kCount % 2 ^ 1);
    } else {
      ptx::barrier_wait(empty(n), n / kCount % 2 ^ 1);
    }
    ptx::barrier_arrive_expect(full(n), bytes);
  }
  // A warp has read it.
  __device__ void release(uint32_t n, int lane) const {
    __syncwarp();
    if constexpr (kShared) {
      if (lane < 2) ptx::barrier_arrive_at(empty(n), static_cast<uint32_t>(lane));
    } else {
      if (lane == 0) ptx::barrier_arrive(empty(n));
    }
  }
};

template <class Problem, LargeShare kShare>
struct LargeRings {
  using Layout = typename Problem::Layout;
  LargeRing<Layout::kWeightSlots, Layout::kWeightBytes, kShare == LargeShare::kWeights> weights;
  LargeRing<Layout::kTokenSlots, Layout::kTokenBytes, kShare == LargeShare::kTokens> tokens;

  __device__ explicit LargeRings(uint8_t* shared) {
    tokens.data = shared;
    weights.data = shared + Layout::kTokenSlots * Layout::kTokenBytes;
    tokens.barriers = reinterpret_cast<uint64_t*>(weights.data + Layout::kWeightSlots * Layout::kWeightBytes);
    weights.barriers = tokens.barriers + 2 * Layout::kTokenSlots;
  }
};

// One thread's copies, of the weights or of the tokens of all items.
template <class Problem, LargeShare kShare, bool kLoose>
struct LargeLoader {
  using Layout = typename Problem::Layout;
  const Problem& p;
  const LargeRings<Problem, kShare>& rings;
  const int rank, cluster, clusters;
  uint32_t n = 0;  // slots filled so far

  __device__ void load_weights() {
    for (int i = cluster; i < p.whole_units; i += clusters) load_weights(p.item(i, rank));
    for (int i = cluster; i < p.half_units(); i += clusters) load_weights(p.half_item(i, rank));
  }
  // Of a segment's first half and then of its second.
  __device__ void load_tokens() {
    const int per = kLoose ? 1 : pairs_per_segment(p.pairs);
    for (int i = cluster; i < p.whole_units; i += clusters) {
      const int tile = p.item(i, rank).first_token / kWgmmaRows;
      for (int begin = 0; begin < p.pairs; begin += per) {
        const int end = min(begin + per, p.pairs);
        load_tokens(tile, begin, end);
        load_tokens(tile + kPieceTokens / kWgmmaRows, begin, end);
      }
    }
    for (int i = cluster; i < p.half_units(); i += clusters)
      load_tokens(p.half_item(i, rank).first_token / kWgmmaRows, 0, p.pairs);
  }

 private:
  __device__ void load_weights(const LargeItem& item) {
    const CUtensorMap* map = p.maps + item.part;
    for (int pair = 0; pair < p.pairs; ++pair, ++n) {
      rings.weights.claim(n, 2 * Layout::kHalfBytes);
      uint8_t* to = rings.weights.slot(n);
      if constexpr (kShare == LargeShare::kWeights) {  // its half, to both
        ptx::box_copy_to(3, to + rank * Layout::kHalfBytes, map, pair * Layout::kPairBytes,
                         item.first_tile + rank * kBoxTiles, rings.weights.full(n));
      } else {
        ptx::box_copy(to, map, pair * Layout::kPairBytes, item.first_tile, rings.weights.full(n));
      }
    }
  }
  __device__ void load_tokens(int tile, int begin, int end) {
    for (int pair = begin; pair < end; ++pair, ++n) {
      rings.tokens.claim(n, Layout::kTokenBytes);
      uint8_t* to = rings.tokens.slot(n);
      const int at = pair * (kWgmmaTileBytes / 1024);
      if constexpr (kShare == LargeShare::kTokens) {  // its half, to both
        ptx::kilobyte_box_copy_to(3, to + rank * kWgmmaTileBytes, &p.token_map, at, tile + rank,
                                  rings.tokens.full(n));
      } else {
        ptx::kilobyte_box_copy(to, &p.token_map, at, tile, rings.tokens.full(n));
      }
    }
  }
};

template <class Problem, class Rings>
struct LargeMultiplier {
  using Layout = typename Problem::Layout;
  const Problem& p;
  const Rings& rings;
  const int warp, lane;
  uint32_t w = 0, x = 0;  // slots read so far
  float total[2][64];     // of the two halves

  // Out of registers that are there anyway.
  __device__ static int rank() { return static_cast<int>(blockIdx.x % Problem::kCtas); }
  __device__ static int cluster() { return static_cast<int>(blockIdx.x / Problem::kCtas); }
  __device__ static int clusters() { return static_cast<int>(gridDim.x / Problem::kCtas); }

  // Slot w's weights times slot x's tokens, left under way.
  __device__ void multiply(float (&sum)[64], uint32_t w_slot, uint32_t x_slot, bool first) {
    const uint64_t b = ptx::wgmma_operand(rings.tokens.slot(x_slot));
    const uint8_t* weights = rings.weights.slot(w_slot);
    if constexpr (Problem::kDirect) {
      const uint64_t a = ptx::wgmma_operand(weights + warp / kGroupWarps * Layout::kHalfBytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::wgmma_bf16(sum, a + 2 * i, b + 2 * i, !first || i > 0);
    } else {
      Fragments f;
      const uint8_t* tile = weights + 2 * warp * Layout::kPairBytes;
      f.template decode<typename Problem::Format>(tile, tile + Layout::kPairBytes, lane);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::wgmma_bf16(sum, f.a[i], b + 2 * i, !first || i > 0);
    }
    ptx::wgmma_commit();
  }

  // The chain of a segment of `count` pairs for one half; kLast: nobody else reads their weights. With `done`
  // (a unit, or -1) the other half's totals are complete: they are stored under way.
  template <int kPiece, bool kLast>
  __device__ void chain(int count, int done) {
    float sum[64];
    for (int j = 0; j < count; ++j) {
      const bool stores = done >= 0 && j == min(1, count - 1);
      if (kPiece == 0) rings.weights.wait_full(w + j);  // the second half has seen it before
      rings.tokens.wait_full(x + j);
      if constexpr (Problem::kDirect) {
        multiply(sum, w + j, x + j, j == 0);
        if (stores) store<1 - kPiece>(p.item(done, rank()));
        if (j > 0) {
          ptx::wgmma_wait<1>();
          release<kLast>(j - 1);
        }
      } else {
        if (j > 0) {  // the fragments are in use until then
          ptx::wgmma_wait<0>();
          release<kLast>(j - 1);
        }
        if (stores)
          store<1 - kPiece>(p.item(done, rank()));  // beside fragments it would not fit the registers
        multiply(sum, w + j, x + j, j == 0);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::hold_sums(sum);
    release<kLast>(count - 1);
#pragma unroll
    for (int i = 0; i < 64; ++i) total[kPiece][i] += sum[i];
    x += count;
    if (kLast) w += count;
  }
  template <int kPiece>
  __device__ void store(const LargeItem& item) {
    p.store(item, kPiece, warp, lane, total[kPiece]);
#pragma unroll
    for (int i = 0; i < 64; ++i) total[kPiece][i] = 0.0f;
  }
  template <bool kLast>
  __device__ void release(int j) const {
    rings.tokens.release(x + j, lane);
    if (kLast) rings.weights.release(w + j, lane);
  }

  __device__ void run() {
    const int per = pairs_per_segment(p.pairs);
    int before = -1;  // the unit whose second half has yet to be stored
#pragma unroll
    for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = 0.0f;
    for (int i = cluster(); i < p.whole_units; i += clusters()) {
      for (int begin = 0; begin < p.pairs; begin += per) {
        const int count = min(per, p.pairs - begin);
        chain<0, false>(count, before);
        before = -1;
        chain<1, true>(count, begin + per >= p.pairs ? i : -1);
      }
      before = i;
    }
    if (before >= 0) store<1>(p.item(before, rank()));
    if constexpr (Problem::kHalves) {
      for (int i = cluster(); i < p.half_units(); i += clusters()) {
        for (int begin = 0; begin < p.pairs; begin += per) chain<0, true>(min(per, p.pairs - begin), -1);
        store<0>(p.half_item(i, rank()));
      }
    }
  }

  __device__ void run_loose() {
    static_assert(Problem::kDirect);
    for (int i = cluster(); i < p.whole_units; i += clusters()) {
      const LargeItem item = p.item(i, rank());
      for (int pair = 0; pair < p.pairs; ++pair, ++w, x += 2) {
        rings.weights.wait_full(w);
        rings.tokens.wait_full(x);
        multiply(total[0], w, x, pair == 0);
        rings.tokens.wait_full(x + 1);
        multiply(total[1], w, x + 1, pair == 0);
        if (pair > 0) {
          ptx::wgmma_wait<2>();
          release_loose(w - 1, x - 2);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::hold_sums(total[0]);
      ptx::hold_sums(total[1]);
      release_loose(w - 1, x - 2);
      p.store(item, 0, warp, lane, total[0]);
      p.store(item, 1, warp, lane, total[1]);
    }
  }
  __device__ void release_loose(uint32_t w_slot, uint32_t x_slot) const {
    rings.tokens.release(x_slot, lane);
    rings.tokens.release(x_slot + 1, lane);
    rings.weights.release(w_slot, lane);
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <PackedFormat kFormat, LargeShare kShare, bool kLoose>
__global__ void __launch_bounds__(kThreads, 1)
    wide_large_kernel(const __grid_constant__ LargeProblem<kFormat, kShare> p) {
#ifdef MILLRACE_HAS_WGMMA
  using Problem = LargeProblem<kFormat, kShare>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const LargeRings<Problem, kShare> rings(shared);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  if (threadIdx.x == 0) {
    rings.weights.init();
    rings.tokens.init();
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncthreads();                                           // the barriers are there
  if constexpr (Problem::kCtas > 1) ptx::cluster_barrier();  // the other CTA's too
  if (warp < kMultiplyWarps) {
    ptx::more_registers<kLargeRegisters>();
    ptx::wait_for_previous();
    LargeMultiplier<Problem, LargeRings<Problem, kShare>> multiplier{p, rings, warp, lane};
    if constexpr (kLoose) {
      multiplier.run_loose();
    } else {
      multiplier.run();
    }
  } else {
    ptx::fewer_registers<kLargeLoaderRegisters>();
    LargeLoader<Problem, kShare, kLoose> loader{p, rings, static_cast<int>(blockIdx.x % Problem::kCtas),
                                                static_cast<int>(blockIdx.x / Problem::kCtas),
                                                static_cast<int>(gridDim.x / Problem::kCtas)};
    if (warp == kMultiplyWarps && lane == 0) {
      loader.load_weights();  // which no kernel of a step writes
    } else if (warp == kMultiplyWarps + 1 && lane == 0) {
      ptx::wait_for_previous();
      loader.load_tokens();
    }
  }
  // Nobody leaves while the other may still arrive at its barriers.
  __syncwarp();
  if constexpr (Problem::kCtas > 1) ptx::cluster_barrier();
#else
  __trap();
#endif
}

// How many CTAs (whole clusters) run at a time.
template <class Kernel>
int resident_ctas(Kernel* kernel, int ctas_per_cluster, size_t shared_bytes) {
  if (ctas_per_cluster == 1) return multiprocessors();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(multiprocessors() / ctas_per_cluster * ctas_per_cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ctas_per_cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check_call(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters");
  return ctas_per_cluster * (clusters > 0 ? clusters : 1);
}

template <PackedFormat kFormat, LargeShare kShare, bool kLoose = false>
void launch_large(const WgmmaLinear& linear, cudaStream_t stream) {
  using Problem = LargeProblem<kFormat, kShare>;
  constexpr int kKilobytes = kWgmmaTileBytes / 1024;
  Problem p{linear, {}, {}, 0};
  p.token_map = ptx::kilobyte_rows_map(p.x.data, static_cast<uint64_t>(divide_up(p.rows, kWgmmaRows)),
                                       static_cast<uint64_t>(p.pairs) * kKilobytes,
                                       kShare == LargeShare::kTokens ? 1 : 2, kKilobytes);
  for (int i = 0; i < p.num_parts; ++i) {
    p.maps[i] = ptx::byte_rows_map(p.parts[i].tiles, static_cast<uint64_t>(p.parts[i].num_tiles),
                                   p.tile_bytes, kShare == LargeShare::kWeights ? kBoxTiles : kLargeTiles,
                                   Problem::Format::kPairBytes);
  }
  const auto kernel = wide_large_kernel<kFormat, kShare, kLoose>;
  allow_shared_memory(kernel, Problem::Layout::kBytes);
  static const int resident = resident_ctas(kernel, Problem::kCtas, Problem::Layout::kBytes);
  const int clusters = resident / Problem::kCtas, rest = p.units() % clusters;
  p.whole_units = kLoose || !Problem::kHalves || 2 * rest > clusters ? p.units() : p.units() - rest;
  const int64_t wanted = p.whole_units > p.half_units() ? p.whole_units : p.half_units();
  const int64_t ctas = Problem::kCtas * (wanted < clusters ? wanted : clusters);
  launch_in_clusters(Problem::kCtas, "wide_large_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                     Problem::Layout::kBytes, stream, p);
}

}  // namespace millrace::cuda
