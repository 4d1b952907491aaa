// The wide products with 8-bit weights on Hopper's warpgroup instructions, to the bit what wide.cu computes.
// Codes go through the tensor cores as integers in f16: the float32 sum of a block of 32 is an integer below
// 2^24 and therefore exact in any order; the scales and the chain of fused multiply-adds over blocks follow
// as everywhere. See docs/kernels/cuda_prefill.md. MXFP4 has a kernel of its own: wide_mx4.cu.
//
// A CTA is persistent: two warpgroups bring operands, two multiply 64 rows x kN outputs each. A stage is one
// pair of blocks: activations come as bulk copies in the layout the tensor core reads (WideRows), weights
// come as they are some pairs ahead, are decoded and stored.
//
// Roofline: 989 TFLOP/s of the tensor cores, 512 cycles per 128 x 128 x 64 of an SM; beside them 512 issue
// slots of each scheduler for the multiply-adds and some 250 to decode.
#include <cuda_fp16.h>

#include "backend/cuda/ops/wide_wgmma.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {
namespace {

constexpr int kRows = kWgmmaRows;                         // of activations, per consumer
constexpr int kScalesAt = kRows * ptx::kSwizzleRowBytes;  // in a tile of activations
constexpr int kTileBytes = kWgmmaTileBytes;
constexpr int kProducers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + kProducers) * kGroupThreads;
constexpr int kProducerWarps = kProducers * kGroupWarps;
// Together what 512 threads of 128 registers start with.
constexpr int kConsumerRegisters = 208, kProducerRegisters = 48;
static_assert(kConsumers * kConsumerRegisters + kProducers * kProducerRegisters == 4 * 128);

// kN weight rows per CTA. Scales of 8-bit weights: [block][t][j][2] of column 8j + 2t + .., as lanes want
// them, their t 36 floats apart so that no two meet in a bank.
template <int kN>
struct WgmmaStage {
  static constexpr int kTileStride = (kTileBytes + 1023) / 1024 * 1024;
  static constexpr int kWeights = kConsumers * kTileStride;
  static constexpr int kWeightScales = kWeights + kN * ptx::kSwizzleRowBytes;
  static constexpr int kLaneScales = 36, kBlockScales = 4 * kLaneScales;
  static constexpr int kBytes = (kWeightScales + 2 * kBlockScales * 4 + 1023) / 1024 * 1024;
  static constexpr int kCount = 5;
  static_assert(kN / 4 <= kLaneScales);
};

// Weights as they are in memory, on their way to a producer warp: two slots of some pairs of its tiles.
template <int kN>
struct RawSlot {
  static constexpr int kCodes = 512, kScales = kCodes / 16;
  static constexpr int kPairs = 1024 / kCodes;
  static constexpr int kTiles = kN / 8 / kProducerWarps;  // of a warp
  static constexpr int kScalesAt = kTiles * kPairs * kCodes;
  static constexpr int kBytes = kScalesAt + kTiles * kPairs * kScales;
  static constexpr int kCount = 2;
};

// Shared memory of a CTA: stages, slots of every producer warp, barriers.
template <int kN>
struct WgmmaShared {
  using Stage = WgmmaStage<kN>;
  using Raw = RawSlot<kN>;
  static constexpr int kRaw = Stage::kCount * Stage::kBytes;
  static constexpr int kBarriers = kRaw + kProducerWarps * Raw::kCount * Raw::kBytes;
  static constexpr int kBytes = kBarriers + (3 * Stage::kCount + kProducerWarps * Raw::kCount) * 8;
};

#ifdef MILLRACE_HAS_WGMMA

// ---------------------------------------------------------------- the ring

template <int kN>
struct WgmmaRing {
  using Shared = WgmmaShared<kN>;
  using Stage = WgmmaStage<kN>;
  uint8_t* stages;
  uint64_t *rows_full, *weights_full, *empty;  // [kCount] each
  uint64_t* raw_full;                          // [producer warp][slot]
  int at = 0;
  uint32_t phase = 0;

  __device__ explicit WgmmaRing(uint8_t* shared) : stages(shared) {
    rows_full = reinterpret_cast<uint64_t*>(shared + Shared::kBarriers);
    weights_full = rows_full + Stage::kCount;
    empty = weights_full + Stage::kCount;
    raw_full = empty + Stage::kCount;
  }
  __device__ void init() const {
    for (int i = 0; i < Stage::kCount; ++i) {
      ptx::barrier_init(rows_full + i, 1);
      ptx::barrier_init(weights_full + i, kProducers * kGroupThreads);
      ptx::barrier_init(empty + i, kConsumers * kGroupThreads);
    }
    for (int i = 0; i < kProducerWarps * Shared::Raw::kCount; ++i) ptx::barrier_init(raw_full + i, 1);
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage() const { return stages + at * Stage::kBytes; }
  __device__ void advance() {
    if (++at == Stage::kCount) at = 0, phase ^= 1;
  }
};

// ---------------------------------------------------------------- bringing operands

// A lane's part of a tile's pair: of row g, elements 4t.. and 16+4t.. of both blocks, in the order of
// store_swizzled (wide.cu): 4t, 16+4t, 4t+1, ..
struct RawPair {
  uint4 codes;
  uint32_t scales;

  __device__ void load(const uint8_t* pair_codes, const uint8_t* pair_scales, int lane) {
    codes = reinterpret_cast<const uint4*>(pair_codes)[lane];
    scales = reinterpret_cast<const uint32_t*>(pair_scales)[lane / 4];
  }
  __device__ uint4 block(bool odd) const {
    constexpr uint32_t kTop = 0x80808080u;
    const uint32_t low = (odd ? codes.y : codes.x) ^ kTop, high = (odd ? codes.w : codes.z) ^ kTop;
    uint4 out;
    codes_to_f16(ptx::permute(low, high, 0x5140u), out.x, out.y);
    codes_to_f16(ptx::permute(low, high, 0x7362u), out.z, out.w);
    return out;
  }
  __device__ float scale(bool odd) const {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(odd ? scales >> 16 : scales & 0xffffu)));
  }
};

template <int kN, class Problem>
class Producer {
 public:
  using Stage = WgmmaStage<kN>;
  using Slot = RawSlot<kN>;
  using Raw = RawPair;
  static constexpr int kTiles = Slot::kTiles;

  __device__ void run(const Problem& p, WgmmaRing<kN> ring) {
    const int thread = threadIdx.x;
    warp_ = thread / kWarpLanes, lane_ = thread % kWarpLanes;
    raw_ = ring.stages + WgmmaShared<kN>::kRaw + warp_ * Slot::kCount * Slot::kBytes;
    raw_full_ = ring.raw_full + warp_ * Slot::kCount;
    const int items = p.template items<kN>();
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      const WgmmaItem item = p.template item<kN>(i);
      const uint8_t* tiles[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) tiles[n] = p.tile(item, warp_ * kTiles + n);
      for (int n = 0; n < Slot::kCount; ++n) ask(tiles, p.pairs, n * Slot::kPairs);
      for (int first = 0; first < p.pairs; first += Slot::kPairs) {
        const uint32_t slot = taken_ % Slot::kCount;
        ptx::barrier_wait(raw_full_ + slot, taken_ / Slot::kCount % 2);
        ++taken_;
        const uint8_t* from = raw_ + slot * Slot::kBytes;
#pragma unroll
        for (int a = 0; a < Slot::kPairs; ++a) {
          if (first + a >= p.pairs) break;
          ptx::barrier_wait(ring.empty + ring.at, ring.phase ^ 1);
          if (thread == 0) bring_rows(p, item, first + a, ring);
          store(from + a * Slot::kCodes, from + Slot::kScalesAt + a * Slot::kScales, ring.stage());
          ptx::publish_to_async();
          ptx::barrier_arrive(ring.weights_full + ring.at);
          ring.advance();
        }
        __syncwarp();  // the slot is read
        ask(tiles, p.pairs, first + Slot::kCount * Slot::kPairs);
      }
    }
  }

 private:
  // The pairs from `first` on into the next slot, if there are any. Copies, not loads: the fence that shows
  // the tensor core what was stored waits for every load under way.
  __device__ void ask(const uint8_t* const (&tiles)[kTiles], int pairs, int first) {
    if (first >= pairs) return;
    const uint32_t slot = asked_++ % Slot::kCount;
    if (lane_ != 0) return;
    const auto count = static_cast<uint32_t>(min(Slot::kPairs, pairs - first));
    uint8_t* to = raw_ + slot * Slot::kBytes;
    ptx::barrier_arrive_expect(raw_full_ + slot, kTiles * count * (Slot::kCodes + Slot::kScales));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      ptx::bulk_copy_kept(to + n * Slot::kPairs * Slot::kCodes, tiles[n] + first * Slot::kCodes,
                          count * Slot::kCodes, raw_full_ + slot);
      ptx::bulk_copy_kept(to + Slot::kScalesAt + n * Slot::kPairs * Slot::kScales,
                          tiles[n] + pairs * Slot::kCodes + first * Slot::kScales, count * Slot::kScales,
                          raw_full_ + slot);
    }
  }

  __device__ static void bring_rows(const Problem& p, const WgmmaItem& item, int pair,
                                    const WgmmaRing<kN>& ring) {
    uint64_t* full = ring.rows_full + ring.at;
    ptx::barrier_arrive_expect(full, static_cast<uint32_t>(item.m_tiles * kTileBytes));
    const uint8_t* from = p.x.codes + (int64_t{item.first_tile} * p.pairs + pair) * kTileBytes;
    ptx::bulk_copy_kept(ring.stage(), from, kTileBytes, full);
    if (item.m_tiles == 1) return;
    ptx::bulk_copy_kept(ring.stage() + Stage::kTileStride, from + int64_t{p.pairs} * kTileBytes, kTileBytes,
                        full);
  }

  // A lane's eight elements of a block are one chunk of 16 bytes. Odd rows begin with the odd block: eight
  // lanes so write to eight different chunks.
  __device__ void store(const uint8_t* codes, const uint8_t* pair_scales, uint8_t* stage) const {
    const int g = lane_ / 4, t = lane_ % 4;
    const bool odd = g % 2 == 1;
    const int first = ((odd ? 4 + t : t) ^ g) * 16;
    auto* scales = reinterpret_cast<float*>(stage + Stage::kWeightScales);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      Raw raw;
      raw.load(codes + n * Slot::kPairs * Slot::kCodes, pair_scales + n * Slot::kPairs * Slot::kScales,
               lane_);
      const int row = (warp_ * kTiles + n) * kTileRows + g;
      uint8_t* to = stage + Stage::kWeights + row * ptx::kSwizzleRowBytes;
      *reinterpret_cast<uint4*>(to + first) = raw.block(odd);
      *reinterpret_cast<uint4*>(to + (first ^ 64)) = raw.block(!odd);
      const int at = g / 2 * Stage::kLaneScales + row / 8 * 2 + g % 2;
      if (t < 2) scales[t * Stage::kBlockScales + at] = raw.scale(t == 1);
    }
  }

  int warp_, lane_;
  uint8_t* raw_;
  uint64_t* raw_full_;
  uint32_t asked_ = 0, taken_ = 0;  // slots
};

// ---------------------------------------------------------------- multiplying

template <int kN, class Problem>
class Consumer {
 public:
  using Stage = WgmmaStage<kN>;

  __device__ void run(const Problem& p, WgmmaRing<kN> ring, int me) {
    const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x % kGroupThreads / kWarpLanes;
    const int row = warp * 16 + lane / 4;
    const int items = p.template items<kN>(), per = pairs_per_segment(p.pairs);
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      const WgmmaItem item = p.template item<kN>(i);
      const bool mine = me < item.m_tiles;
      float total[kN / 2], sum[kN / 2];
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) total[j] = sum[j] = 0.0f;
      int left = per;
      for (int pair = 0; pair < p.pairs; ++pair) {
        ptx::barrier_wait(ring.rows_full + ring.at, ring.phase);
        ptx::barrier_wait(ring.weights_full + ring.at, ring.phase);
        if (mine) multiply(ring.stage(), me, row, lane % 4, sum);
        ptx::barrier_arrive(ring.empty + ring.at);
        ring.advance();
        if (--left == 0 || pair + 1 == p.pairs) {  // a segment ends
          left = per;
#pragma unroll
          for (int j = 0; j < kN / 2; ++j) total[j] += sum[j], sum[j] = 0.0f;
        }
      }
      if (mine) p.template store<kN>(item, me * kRows + row, lane % 4, total);
    }
  }

 private:
  __device__ static void multiply(const uint8_t* stage, int me, int row, int t, float (&sum)[kN / 2]) {
    const uint8_t* rows = stage + me * Stage::kTileStride;
    const uint64_t a = ptx::wgmma_operand(rows), b = ptx::wgmma_operand(stage + Stage::kWeights);
    const auto* row_scales = reinterpret_cast<const float*>(rows + kScalesAt) + row;
    const auto* scales =
        reinterpret_cast<const float4*>(stage + Stage::kWeightScales + t * Stage::kLaneScales * 4);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float d[kN / 2];
      ptx::wgmma_fence();
      ptx::wgmma_f16(d, a + 4 * block, b + 4 * block, false);
      ptx::wgmma_f16(d, a + 4 * block + 2, b + 4 * block + 2, true);
      ptx::wgmma_commit();
      const float low = row_scales[block * kRows], high = row_scales[block * kRows + 8];
      ptx::wgmma_wait<0>();
      ptx::hold_sums(d);
#pragma unroll
      for (int j = 0; j < kN / 8; j += 2) {
        const float4 s = scales[block * (Stage::kBlockScales / 4) + j / 2];
        add_four(d, 4 * j, s.x, s.y, low, high, sum);
        add_four(d, 4 * j + 4, s.z, s.w, low, high, sum);
      }
    }
  }

  __device__ static void add_four(const float (&d)[kN / 2], int at, float even, float odd, float low,
                                  float high, float (&sum)[kN / 2]) {
    sum[at] = fmaf(d[at], even * low, sum[at]);
    sum[at + 1] = fmaf(d[at + 1], odd * low, sum[at + 1]);
    sum[at + 2] = fmaf(d[at + 2], even * high, sum[at + 2]);
    sum[at + 3] = fmaf(d[at + 3], odd * high, sum[at + 3]);
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <int kN, class Problem>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  WgmmaRing<kN> ring(shared);
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  ptx::wait_for_previous();
  const int group = threadIdx.x / kGroupThreads;
  if (group < kProducers) {
    ptx::fewer_registers<kProducerRegisters>();
    Producer<kN, Problem>().run(p, ring);
  } else {
    ptx::more_registers<kConsumerRegisters>();
    Consumer<kN, Problem>().run(p, ring, group - kProducers);
  }
#else
  __trap();
#endif
}

template <int kN, class Problem>
void launch_as(const Problem& p, int64_t items, cudaStream_t stream) {
  const auto kernel = wgmma_kernel<kN, Problem>;
  constexpr size_t kShared = WgmmaShared<kN>::kBytes;
  allow_shared_memory(kernel, kShared);
  const int64_t ctas = items < multiprocessors() ? items : multiprocessors();
  launch_dependent("wgmma_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, kShared, stream, p);
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <bool kGateUp>
void launch_experts_for(const WideExperts& op, cudaStream_t stream) {
  const WgmmaExperts<kGateUp> p{op, op.x, op.gate.pairs};
  const int64_t items = divide_up(op.gate.tiles_per_expert, kGateUp ? 8 : 16) * op.groups.max_chunks;
  launch_as<128>(p, items, stream);
}

}  // namespace

void launch_wgmma_linear(const WideLinear& op, cudaStream_t stream) {
  WgmmaLinear p{};
  p.num_parts = op.num_parts;
  for (int i = 0; i < op.num_parts; ++i) {
    const WideLinear::Part& part = op.parts[i];
    p.parts[i] = {part.w.tiles, part.bias, part.out, static_cast<int32_t>(part.w.rows),
                  part.w.tiles_per_expert};
  }
  p.pairs = op.parts[0].w.pairs;
  p.tile_bytes = op.parts[0].w.tile_bytes;
  p.x = op.x;
  p.rows = op.rows;
  p.add = op.add;
  if (p.items<64>() == 0) return;
  if (op.parts[0].w.format == PackedFormat::kMx4) return launch_mx4_linear(p, stream);
  if (p.items<128>() < multiprocessors()) return launch_as<64>(p, p.items<64>(), stream);
  launch_as<128>(p, p.items<128>(), stream);
}

void launch_wgmma_experts(const WideExperts& op, cudaStream_t stream) {
  if (op.gate.format == PackedFormat::kMx4) return launch_mx4_experts(op, stream);
  op.up.format != PackedFormat::kNone ? launch_experts_for<true>(op, stream)
                                      : launch_experts_for<false>(op, stream);
}

bool has_wgmma() {
  static const bool has = [] {
    cudaFuncAttributes attributes{};
    check_call(cudaFuncGetAttributes(&attributes, wgmma_kernel<64, WgmmaLinear>), "cudaFuncGetAttributes");
    // Without sm_90a in the build the kernel is a trap, which takes few registers.
    return attributes.binaryVersion == 90 && attributes.numRegs > 64;
  }();
  return has;
}

}  // namespace millrace::cuda
