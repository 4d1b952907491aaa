// Wide products on Hopper's warpgroup instructions, for every packed format: weights are the rows of a
// product, tokens its columns. A warp decodes its 16 rows of weights in registers into the very fragments
// that the tensor core takes from there; activations are bf16 in shared memory. A segment of the columns is
// one chain of products (tile_format.cuh), and what the other units have to do is decode and, at the end of a
// segment, add.
//
// A CTA is persistent: two warpgroups multiply 64 rows of weights each by up to 128 tokens or, where there is
// too little work for all SMs, the same 64 rows by half of the tokens each. A stage is a pair of blocks: one
// thread brings its raw weights, a box of tiles (of gate and of up: two), another its tokens.
//
// Roofline: 989 TFLOP/s of the tensor cores, 512 cycles per stage of 128 x 128 x 64. Decoding MXFP4 takes
// some 160 cycles of each scheduler's integer unit meanwhile, 8 bits some 60. All SMs' stages want 5 (MXFP4)
// to 10 (bf16) TB/s from L2 at that rate, which gives about 7.
#pragma once

#include "kernels/cuda/gemm/cluster_schedule.h"
#include "kernels/cuda/gemm/wgmma_launch.cuh"
#include "kernels/cuda/ptx/tensor_map.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {

inline constexpr int kMostTokens = 2 * kWgmmaRows;  // of a CTA
inline constexpr int kMultiplyWarps = kConsumers * kGroupWarps;
inline constexpr int kThreads =
    (kConsumers + 1) * kGroupThreads;  // of the last group two threads are at work: the loaders
// Together what 384 threads of 168 registers start with.
inline constexpr int kConsumerRegisters = 240, kLoaderRegisters = 24;
static_assert(kConsumers * kConsumerRegisters + kLoaderRegisters == 3 * 168);
inline constexpr int kBoxTiles = 8;  // of raw weights, that one copy brings

// Shared memory: stages of [tokens][raw weights], barriers. kBoxes: 2, the warpgroups have rows of their own;
// 1: both have the same 64, and half of the tokens.
template <PackedFormat kFormat, int kBoxes>
struct Stages {
  static constexpr int kBoxBytes = kBoxTiles * TileFormat<kFormat>::kPairBytes;
  static constexpr int kRawAt = kMostTokens * ptx::kSwizzleRowBytes;
  static constexpr int kStageBytes = (kRawAt + kBoxes * kBoxBytes + 1023) / 1024 * 1024;
  static constexpr int kMostBytes = 232448;
  static constexpr int kFits = kMostBytes / (kStageBytes + 2 * 8);
  static constexpr int kCount = kFits < 12 ? kFits : 12;
  static constexpr int kBytes = kCount * (kStageBytes + 2 * 8);
  static constexpr int kOutputs = kBoxes * kBoxTiles * kTileRows;
  static_assert(kBoxBytes % 128 == 0);
};

// ---------------------------------------------------------------- what is multiplied

template <PackedFormat kFormat, int kBoxes>
struct LinearProblem : WgmmaLinear {
  static constexpr bool kDirect = kFormat == PackedFormat::kBf16;  // weights are an operand as they lie
  using Layout = Stages<kFormat, kBoxes>;
  using Format = TileFormat<kFormat>;
  static constexpr int kBoxCount = kBoxes;
  static constexpr int kCopies = 1;  // of weights, for a stage
  CUtensorMap rows_map, maps[3];     // of activations, of the parts

  __device__ const CUtensorMap* map(const WgmmaItem& item, int) const { return maps + item.matrix; }
  __device__ int first_tile(const WgmmaItem& item) const { return item.first_n; }
  // Which of a stage's tiles are rows 0-7 and 8-15 of a warp.
  __device__ static int raw_tile(int warp, int half) { return 2 * warp % (kBoxes * kBoxTiles) + half; }

  // sum: of rows g and g + 8 of the warp's, tokens first + 8j + 2t and + 1.
  template <int kTokens>
  __device__ void store(const WgmmaItem& item, int warp, int g, int t, int first,
                        const float (&sum)[kTokens / 2]) const {
    const Part& part = parts[item.matrix];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (item.first_n + raw_tile(warp, half)) * kTileRows + g;
      if (column >= part.rows) continue;
      const float bias = part.bias != nullptr ? part.bias[column] : 0.0f;
      float* to = part.out + (int64_t{item.first_tile} * kWgmmaRows + first + 2 * t) * part.rows + column;
      const int left = item.rows - first - 2 * t;  // tokens from there on
      float old[kTokens / 4];                      // all asked for before anything is stored
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const int token = i / 2 * 8 + i % 2;
        old[i] = add && token < left ? to[int64_t{token} * part.rows] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const int token = i / 2 * 8 + i % 2;
        const float value = sum[i / 2 * 4 + 2 * half + i % 2] + bias;
        if (token < left) to[int64_t{token} * part.rows] = add ? old[i] + value : value;
      }
    }
  }
};

template <PackedFormat kFormat>
struct DownProblem : WgmmaExperts<false> {
  static constexpr bool kDirect = kFormat == PackedFormat::kBf16;
  using Layout = Stages<kFormat, 2>;
  using Format = TileFormat<kFormat>;
  static constexpr int kBoxCount = 2;
  static constexpr int kCopies = 1;
  CUtensorMap rows_map, maps[1];

  __device__ const CUtensorMap* map(const WgmmaItem&, int) const { return maps; }
  __device__ int first_tile(const WgmmaItem& item) const {
    return item.matrix * op.gate.tiles_per_expert + item.first_n;
  }
  __device__ static int raw_tile(int warp, int half) { return 2 * warp + half; }

  template <int kTokens>
  __device__ void store(const WgmmaItem& item, int warp, int g, int t, int,
                        const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int32_t* order = op.groups.order + int64_t{item.first_tile} * kWgmmaRows + 2 * t;
    const int column = (item.first_n + raw_tile(warp, 0)) * kTileRows + g;
    float bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (op.gate_bias != nullptr && column + half * kTileRows < columns) {
        bias[half] = op.gate_bias[int64_t{item.matrix} * columns + column + half * kTileRows];
      }
    }
    int32_t pair[kTokens / 4];
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) pair[i] = order[i / 2 * 8 + i % 2];
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      if (pair[i] < 0) continue;
      float* to = op.out + int64_t{pair[i]} * columns + column;
      if (column < columns) to[0] = sum[i / 2 * 4 + i % 2] + bias[0];
      if (column + kTileRows < columns) to[kTileRows] = sum[i / 2 * 4 + 2 + i % 2] + bias[1];
    }
  }
};

template <PackedFormat kFormat>
struct GateUpProblem : WgmmaExperts<true> {
  static constexpr bool kDirect = false;  // gate and up rows alternate
  using Layout = Stages<kFormat, 2>;
  using Format = TileFormat<kFormat>;
  static constexpr int kBoxCount = 2;
  static constexpr int kCopies = 2;
  CUtensorMap rows_map, maps[2];  // of gate and up

  __device__ const CUtensorMap* map(const WgmmaItem&, int half) const { return maps + half; }
  __device__ int first_tile(const WgmmaItem& item) const {
    return item.matrix * op.gate.tiles_per_expert + item.first_n;
  }
  __device__ static int raw_tile(int warp, int half) { return warp + half * kBoxTiles; }

  template <int kTokens>
  __device__ void store(const WgmmaItem& item, int warp, int g, int t, int,
                        const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int column = (item.first_n + warp) * kTileRows + g;
    const bool there = column < columns;
    const int64_t bias_at = int64_t{item.matrix} * columns + column;
    const float gate_bias = there && op.gate_bias != nullptr ? op.gate_bias[bias_at] : 0.0f;
    const float up_bias = there && op.up_bias != nullptr ? op.up_bias[bias_at] : 0.0f;
    if (op.act.data == nullptr) return store_plain<kTokens>(item, column, t, gate_bias, up_bias, sum);
    if (op.activation.clamped) return store_operand<kTokens, true>(item, warp, g, t, gate_bias, up_bias, sum);
    store_operand<kTokens, false>(item, warp, g, t, gate_bias, up_bias, sum);
  }
  template <int kTokens, bool kClamped>
  __device__ void store_operand(const WgmmaItem& item, int warp, int g, int t, float gate_bias, float up_bias,
                                const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int column = (item.first_n + warp) * kTileRows + g;
    const bool there = column < columns;
    const float alpha = op.activation.alpha, limit = op.activation.limit;
    // Straight into the operand of down, whose rows are in the same order. A lane and its neighbour of the
    // next row exchange tokens, so that each has two columns of one. Columns past the last are zeros.
    const bool odd = g % 2 == 1;
    const uint32_t byte =
        column_position(op.act_weights, static_cast<uint32_t>(warp * kTileRows + g - (odd ? 1 : 0))) * 2;
    uint8_t* tile = op.act.data + (int64_t{item.first_tile} * packed_pairs(columns) + column / kPairColumns) *
                                      kWgmmaTileBytes;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float a = activate_as<kClamped>(alpha, limit, sum[4 * j] + gate_bias, sum[4 * j + 2] + up_bias);
      float b = activate_as<kClamped>(alpha, limit, sum[4 * j + 1] + gate_bias, sum[4 * j + 3] + up_bias);
      if (!there) a = b = 0.0f;
      const float other = __shfl_xor_sync(kAllLanes, odd ? a : b, 4);
      const uint32_t token = static_cast<uint32_t>(8 * j + 2 * t) + (odd ? 1u : 0u), row = token % kWgmmaRows;
      uint8_t* to = tile + (token >= kWgmmaRows ? int64_t{packed_pairs(columns)} * kWgmmaTileBytes : 0);
      *reinterpret_cast<uint32_t*>(to + ptx::swizzled(row, byte)) =
          odd ? bf16_pair(other, b) : bf16_pair(a, other);
    }
  }
  template <int kTokens>
  __device__ void store_plain(const WgmmaItem& item, int column, int t, float gate_bias, float up_bias,
                              const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int32_t* order = op.groups.order + int64_t{item.first_tile} * kWgmmaRows + 2 * t;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      const int32_t pair = order[i / 2 * 8 + i % 2];
      const int at = i / 2 * 4 + i % 2;
      if (pair < 0 || column >= columns) continue;
      op.out[int64_t{pair} * columns + column] =
          activate(op.activation, sum[at] + gate_bias, sum[at + 2] + up_bias);
    }
  }
};

// How many tokens a stage has. More widths than two would not fit the registers: the fragments of each have
// their own. A warpgroup has at least 32.
template <int kMost, int kBoxes>
__device__ inline int width_of(const WgmmaItem& item) {
  return item.rows <= kMost / 2 && kMost / 2 >= 32 * (3 - kBoxes) ? kMost / 2 : kMost;
}

#ifdef MILLRACE_HAS_WGMMA

// Stages are numbered through, over all items of a CTA; stage n lies at n % kCount. full completes when its
// operands are there, empty when all kReaders warps have read them.
template <class Layout, int kReaders = kMultiplyWarps>
struct WideRing {
  static constexpr int kCount = Layout::kCount;
  uint8_t* stages;
  uint64_t *full, *empty;

  __device__ explicit WideRing(uint8_t* shared) : stages(shared) {
    full = reinterpret_cast<uint64_t*>(shared + kCount * Layout::kStageBytes);
    empty = full + kCount;
  }
  __device__ void init() const {
    for (int i = 0; i < kCount; ++i) {
      ptx::barrier_init(full + i, 2);
      ptx::barrier_init(empty + i, kReaders);
    }
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage(uint32_t n) const { return stages + n % kCount * Layout::kStageBytes; }
  __device__ void wait_empty(uint32_t n) const { ptx::barrier_wait(empty + n % kCount, n / kCount % 2 ^ 1); }
};

// Who brings what, one thread each. Asking for a copy takes a thread 100 to 200 cycles: all of a stage's by
// one would take longer than its products.
enum class Brings { kWeights, kTokens };

template <int kMost, Brings kBrings, class Problem>
__device__ void load_items(const Problem& p, const WideRing<typename Problem::Layout>& ring) {
  using Layout = typename Problem::Layout;
  constexpr int kBoxes = Problem::kBoxCount;
  uint32_t n = 0;
  const int items = p.template items<Layout::kOutputs>();
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const WgmmaItem item = p.template item<Layout::kOutputs>(i);
    const int width = width_of<kMost, kBoxes>(item);
    const uint8_t* rows = p.x.data + int64_t{item.first_tile} * p.pairs * kWgmmaTileBytes;
    const int tile = p.first_tile(item);
    const auto bytes = static_cast<uint32_t>(kBrings == Brings::kWeights ? kBoxes * Layout::kBoxBytes
                                                                         : width * ptx::kSwizzleRowBytes);
    for (int pair = 0; pair < p.pairs; ++pair, ++n) {
      ring.wait_empty(n);
      uint64_t* full = ring.full + n % Layout::kCount;
      uint8_t* stage = ring.stage(n);
      ptx::barrier_arrive_expect(full, bytes);
      if constexpr (kBrings == Brings::kWeights) {
        for (int copy = 0; copy < Problem::kCopies; ++copy) {
          ptx::box_copy(stage + Layout::kRawAt + copy * Layout::kBoxBytes, p.map(item, copy),
                        pair * Problem::Format::kPairBytes, tile, full);
        }
      } else if (width > kWgmmaRows) {
        ptx::kilobyte_box_copy(stage, &p.rows_map, pair * (kWgmmaTileBytes / 1024), item.first_tile, full);
      } else {
        ptx::bulk_copy_kept(stage, rows + pair * kWgmmaTileBytes, bytes, full);
      }
    }
  }
}

// A lane's fragments of a pair of blocks: four steps of 16 columns.
struct Fragments {
  uint32_t a[4][4];

  template <class Format>
  __device__ void decode(const uint8_t* low_tile, const uint8_t* high_tile, int lane) {
    uint32_t low[4][2], high[4][2];
    Format::load(low_tile, lane, low);
    Format::load(high_tile, lane, high);
#pragma unroll
    for (int s = 0; s < 4; ++s)
      a[s][0] = low[s][0], a[s][1] = high[s][0], a[s][2] = low[s][1], a[s][3] = high[s][1];
  }
};

// Where a warp is in a ring of slots with barriers [full][empty]. Slots are counted on, not divided out, and
// addresses are the warp's, not a lane's: a warp's next product is accepted when its last one is under way,
// so what stands between the last product of a slot and the first of the next is time in which the tensor
// cores run dry.
template <int kCount, int kSlotBytes>
struct SlotCursor {
  const uint8_t* slots;
  uint32_t data, barriers;  // addresses in shared memory
  uint32_t slot = 0, parity = 0;

  __device__ SlotCursor(const uint8_t* first, const uint64_t* full)
      : slots(first),
        data(ptx::warp_uniform(ptx::shared_address(first))),
        barriers(ptx::warp_uniform(ptx::shared_address(full))) {}
  __device__ const uint8_t* bytes() const { return slots + slot * kSlotBytes; }
  // An operand so many bytes into the slot.
  __device__ uint64_t operand(uint32_t offset) const {
    return ptx::wgmma_operand_at(data + offset) + slot * (kSlotBytes / 16u);
  }
  __device__ void wait() const { ptx::barrier_wait_at(barriers + 8 * slot, parity); }
  __device__ void advance() {
    if (++slot == kCount) slot = 0, parity ^= 1u;
  }
  // The warp has read it.
  __device__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_at(barriers + 8 * (kCount + slot));
  }
  __device__ void release_previous(int lane) const { previous().release(lane); }
  __device__ SlotCursor previous() const {  // to be given back: its parity is not meant
    SlotCursor before = *this;
    before.slot = slot == 0 ? kCount - 1u : slot - 1;
    return before;
  }
};
template <class Layout>
using StageCursor = SlotCursor<Layout::kCount, Layout::kStageBytes>;

template <int kTokens, class Problem>
struct Multiplier {
  using Layout = typename Problem::Layout;
  const Problem& p;
  StageCursor<Layout>& at;
  const int warp, lane;
  const int group;             // of the warpgroups, the warp's
  const uint32_t first_token;  // of the stage's
  float sum[kTokens / 2];

  // A stage's weights, decoded while products of the stage before are under way.
  __device__ void load(Fragments& f) const {
    using Format = typename Problem::Format;
    const uint8_t* raw = at.bytes() + Layout::kRawAt;
    f.template decode<Format>(raw + Problem::raw_tile(warp, 0) * Format::kPairBytes,
                              raw + Problem::raw_tile(warp, 1) * Format::kPairBytes, lane);
  }
  // Products kFirst to kLast - 1 of the stage's four, left under way.
  template <int kFirst, int kLast>
  __device__ void multiply(const Fragments& f, bool first) {
    const uint64_t b = at.operand(first_token * ptx::kSwizzleRowBytes);
    const uint64_t a =
        at.operand(Layout::kRawAt + static_cast<uint32_t>(group % Problem::kBoxCount * Layout::kBoxBytes));
    if (kFirst == 0) ptx::wgmma_fence();
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      if constexpr (Problem::kDirect) {
        ptx::wgmma_bf16(sum, a + 2 * i, b + 2 * i, !first || i > 0);
      } else {
        ptx::wgmma_bf16(sum, f.a[i], b + 2 * i, !first || i > 0);
      }
    }
    ptx::wgmma_commit();
  }
  // The sum of a segment is there.
  __device__ void end_segment(const StageCursor<Layout>& last, float (&total)[kTokens / 2]) {
    ptx::wgmma_wait<0>();
    ptx::hold_sums(sum);
    last.release(lane);
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] += sum[j];
  }

  // Weights that are operands as they lie: under a stage's first two products the stage before is given back,
  // under the others the next is waited for.
  __device__ void run_direct(float (&total)[kTokens / 2], int per) {
    int done = 0;        // pairs of the segment
    int left = p.pairs;  // of the item
    const auto step = [&] {
      const Fragments none{};
      multiply<0, 2>(none, done == 0);
      if (done > 0) {
        ptx::wgmma_wait<1>();
        at.release_previous(lane);
      }
      StageCursor<Layout> next = at;
      next.advance();
      --left;
      multiply<2, 4>(none, false);
      if (left > 0) next.wait();
      if (++done == per || left == 0) {
        done = 0;
        end_segment(at, total);
      }
      at = next;
    };
    at.wait();
    while (true) {  // by twos: or the assembler waits for products between two stages
      step();
      if (left == 0) break;
      step();
      if (left == 0) break;
    }
  }
  // Weights that are decoded: under the four products of the stage before.
  __device__ void run_decoded(float (&total)[kTokens / 2], int per) {
    int done = 0;
    const auto step = [&](Fragments& f) {
      at.wait();
      load(f);
      if (done == per) {
        end_segment(at.previous(), total);
        done = 0;
      }
      multiply<0, 4>(f, done == 0);
      if (done > 0) {
        ptx::wgmma_wait<1>();
        at.release_previous(lane);
      }
      ++done;
      at.advance();
    };
    Fragments even, odd;
    int pair = 0;
    for (; pair + 1 < p.pairs; pair += 2) {
      step(even);
      step(odd);
    }
    if (pair < p.pairs) step(even);
    end_segment(at.previous(), total);
  }

  __device__ void run(const WgmmaItem& item) {
    const int per = pairs_per_segment(p.pairs);
    float total[kTokens / 2];
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] = 0.0f;
    if constexpr (Problem::kDirect) {
      run_direct(total, per);
    } else {
      run_decoded(total, per);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] *= Problem::Format::kUnscale;
    p.template store<kTokens>(item, warp, lane / 4, lane % 4, static_cast<int>(first_token), total);
  }
};

template <int kMost, class Problem>
__device__ void multiply_items(const Problem& p, const WideRing<typename Problem::Layout>& ring) {
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / kWarpLanes)),
            lane = threadIdx.x % kWarpLanes;
  constexpr int kBoxes = Problem::kBoxCount, kOutputs = Problem::Layout::kOutputs;
  constexpr int kWide = kMost / (3 - kBoxes), kNarrow = kWide / 2 < 32 ? 32 : kWide / 2;
  const int group = warp / kGroupWarps;
  const auto share = static_cast<uint32_t>(kBoxes == 1 ? group : 0);  // of the tokens
  StageCursor<typename Problem::Layout> at(ring.stages, ring.full);
  const int items = p.template items<kOutputs>();
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const WgmmaItem item = p.template item<kOutputs>(i);
    if (kNarrow == kWide || width_of<kMost, kBoxes>(item) == kMost) {
      Multiplier<kWide, Problem>{p, at, warp, lane, group, share * kWide, {}}.run(item);
    } else {
      Multiplier<kNarrow, Problem>{p, at, warp, lane, group, share * kNarrow, {}}.run(item);
    }
  }
}

#endif  // MILLRACE_HAS_WGMMA

template <int kMost, class Problem>
__global__ void __launch_bounds__(kThreads, 1) wide_product_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const WideRing<typename Problem::Layout> ring(shared);
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  ptx::wait_for_previous();
  if (threadIdx.x / kWarpLanes < kMultiplyWarps) {
    ptx::more_registers<kConsumerRegisters>();
    multiply_items<kMost>(p, ring);
  } else {
    ptx::fewer_registers<kLoaderRegisters>();
    const int thread = threadIdx.x % kGroupThreads;
    if (thread == 0) load_items<kMost, Brings::kWeights>(p, ring);
    if (thread == kWarpLanes) load_items<kMost, Brings::kTokens>(p, ring);
  }
#else
  __trap();
#endif
}

template <int kMost, class Problem>
void launch_as(const Problem& p, int64_t items, const Launch& at) {
  constexpr size_t kShared = Problem::Layout::kBytes;
  const auto kernel = wide_product_kernel<kMost, Problem>;
  allow_shared_memory(kernel, kShared);
  const int64_t ctas = items < at.device.sm_count() ? items : at.device.sm_count();
  launch_dependent("wide_product_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, kShared, at,
                   p);
}
template <class Problem>
void launch_for(const Problem& p, int64_t most_rows, int64_t items, const Launch& at) {
  most_rows <= kWgmmaRows ? launch_as<kWgmmaRows>(p, items, at) : launch_as<2 * kWgmmaRows>(p, items, at);
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Boxes of so many tiles x a pair of blocks.
template <PackedFormat kFormat>
CUtensorMap map_of(const uint8_t* tiles, int64_t count, uint32_t tile_bytes, int box_tiles) {
  return ptx::byte_rows_map(tiles, static_cast<uint64_t>(count), tile_bytes, static_cast<uint32_t>(box_tiles),
                            TileFormat<kFormat>::kPairBytes);
}
template <PackedFormat kFormat>
CUtensorMap map_of(const PackedMatrix& w, int64_t experts, int box_tiles) {
  return map_of<kFormat>(w.tiles, experts * w.tiles_per_expert, w.tile_bytes, box_tiles);
}
// Boxes of so many tiles of 64 rows x a pair of blocks.
inline CUtensorMap rows_map_of(const WideRows& x, int64_t tiles, int32_t pairs, uint32_t box_tiles = 2) {
  constexpr int kKilobytes = kWgmmaTileBytes / 1024;
  return ptx::kilobyte_rows_map(x.data, static_cast<uint64_t>(tiles),
                                static_cast<uint64_t>(pairs) * kKilobytes, box_tiles, kKilobytes);
}

template <PackedFormat kFormat, int kBoxes>
void launch_linear_as(const WgmmaLinear& linear, const Launch& at) {
  LinearProblem<kFormat, kBoxes> p{
      linear, rows_map_of(linear.x, divide_up(linear.rows, kWgmmaRows), linear.pairs), {}};
  for (int i = 0; i < p.num_parts; ++i)
    p.maps[i] = map_of<kFormat>(p.parts[i].tiles, p.parts[i].num_tiles, p.tile_bytes, kBoxes * kBoxTiles);
  const int64_t rows = p.rows < p.item_rows ? p.rows : p.item_rows;
  launch_for(p, rows, p.template items<Stages<kFormat, kBoxes>::kOutputs>(), at);
}

// Which items: what should take least. A round of each, in parts of what `millrace tune` measured for q, k, v
// and the projection of gpt-oss-20b in 8 bits on an H200: 64 outputs cost 0.67 to 0.73 of 128, 64 x 64 some
// 0.57, and with few rows only the weights count.
inline WideItems least_time(WgmmaLinear p, bool fitted, bool cut, const Device& device) {
  const auto rounds = [&](int64_t items) { return divide_up(items, device.sm_count()); };
  p.item_rows = kWgmmaRows;
  const int64_t small = (p.rows > kWgmmaRows ? 320 : 220) * rounds(p.items<64>());
  p.item_rows = 2 * kWgmmaRows;
  const int64_t half = (p.rows > kWgmmaRows ? 385 : 220) * rounds(p.items<64>());
  const int64_t whole = (p.rows > kWgmmaRows ? 560 : p.rows > 32 ? 320 : 220) * rounds(p.items<128>());
  WideItems best = WideItems::kWhole;
  int64_t least = whole;
  const auto consider = [&](WideItems items, int64_t time) {
    if (time < least) best = items, least = time;
  };
  consider(WideItems::kHalf, half);
  consider(WideItems::kSmall, small);
  if (!fitted) return best;
  int32_t tiles[kMostParts] = {};
  for (int i = 0; i < p.num_parts; ++i) tiles[i] = p.parts[i].num_tiles;
  const FittedChoice choice(tiles, p.num_parts, p.rows, p.pairs, device.sm_count() / kClusterCtas, cut);
  if (choice.shape >= 0) consider(WideItems::kFitted, choice.time);
  return best;
}

template <PackedFormat kFormat>
void launch_wgmma_linear(const WideLinear& op, const Launch& at) {
  WgmmaLinear p = wgmma_linear(op);
  WideItems items = op.items;
  if (items == WideItems::kDefault || !fits_items(items, op))
    items = least_time(p, fits_items(WideItems::kFitted, op), op.split.totals != nullptr, at.device);
  p.item_rows = items == WideItems::kSmall ? kWgmmaRows : 2 * kWgmmaRows;
  switch (items) {
    case WideItems::kWhole:
      return launch_linear_as<kFormat, 2>(p, at);
    case WideItems::kHalf:
    case WideItems::kSmall:
      return launch_linear_as<kFormat, 1>(p, at);
    default:
      return launch_fitted_linear(op, items, at);
  }
}

template <PackedFormat kFormat>
void launch_wgmma_experts(const WideExperts& op, const Launch& at) {
  const int64_t tiles = op.gate.tiles_per_expert, chunks = op.groups.max_chunks;
  const int64_t most_rows = int64_t{op.groups.tiles_per_chunk} * op.groups.tile_rows;
  const CUtensorMap rows_map = rows_map_of(op.x, op.groups.max_rows / kWgmmaRows, op.gate.pairs);
  if (op.up.format == PackedFormat::kNone) {
    const DownProblem<kFormat> p{
        {op, op.x, op.gate.pairs}, rows_map, {map_of<kFormat>(op.gate, op.experts, 2 * kBoxTiles)}};
    return launch_for(p, most_rows, divide_up(tiles, 2 * kBoxTiles) * chunks, at);
  }
  const GateUpProblem<kFormat> p{
      {op, op.x, op.gate.pairs},
      rows_map,
      {map_of<kFormat>(op.gate, op.experts, kBoxTiles), map_of<kFormat>(op.up, op.experts, kBoxTiles)}};
  launch_for(p, most_rows, divide_up(tiles, kBoxTiles) * chunks, at);
}

}  // namespace millrace::cuda
