// The wide products on Hopper's warpgroup instructions, to the bit what wide.cu computes. Codes of
// activations go through the tensor cores as integers in f16 (for 8-bit weights) or bf16 (for MXFP4): the
// float32 sum of a block of 32 is an integer below 2^24, times a power of two, and therefore exact in any
// order; the scales and the chain of fused multiply-adds over blocks follow as everywhere. A power of two
// goes into the bf16 weight: one multiply-add is then left per output and block. See
// docs/kernels/cuda_prefill.md.
//
// A CTA is persistent: two warpgroups bring operands, two multiply 64 rows x kN outputs each. A stage is one
// pair of blocks: activations come as bulk copies in the layout the tensor core reads (WideRows), weights
// come as they are some pairs ahead, are decoded and stored.
//
// Roofline: 989 TFLOP/s of the tensor cores, 512 cycles per 128 x 128 x 64 of an SM; beside them 256 issue
// slots of each scheduler for the multiply-adds (512 for 8-bit weights) and some 250 to decode.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/ops/activation.cuh"
#include "backend/cuda/ops/launch.cuh"
#include "backend/cuda/ops/tile_stream.cuh"
#include "backend/cuda/ops/wide.h"
#include "backend/cuda/ptx/wgmma.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {
namespace {

constexpr int kGroupThreads = 128;             // a warpgroup
constexpr int kConsumers = 2, kProducers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + kProducers) * kGroupThreads;
constexpr int kProducerWarps = kProducers * kGroupThreads / kWarpLanes;
constexpr int kRows = kWgmmaRows;                         // of activations, per consumer
constexpr int kScalesAt = kRows * ptx::kSwizzleRowBytes;  // in a tile of activations
constexpr int kTileBytes = kWgmmaTileBytes;
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
template <PackedFormat kFormat, int kN>
struct RawSlot {
  static constexpr int kCodes = kFormat == PackedFormat::kMx4 ? 256 : 512, kScales = kCodes / 16;
  static constexpr int kPairs = 1024 / kCodes;
  static constexpr int kTiles = kN / 8 / kProducerWarps;  // of a warp
  static constexpr int kScalesAt = kTiles * kPairs * kCodes;
  static constexpr int kBytes = kScalesAt + kTiles * kPairs * kScales;
  static constexpr int kCount = 2;
};

// Shared memory of a CTA: stages, slots of every producer warp, barriers.
template <PackedFormat kFormat, int kN>
struct WgmmaShared {
  using Stage = WgmmaStage<kN>;
  using Raw = RawSlot<kFormat, kN>;
  static constexpr int kRaw = Stage::kCount * Stage::kBytes;
  static constexpr int kBarriers = kRaw + kProducerWarps * Raw::kCount * Raw::kBytes;
  static constexpr int kBytes = kBarriers + (3 * Stage::kCount + kProducerWarps * Raw::kCount) * 8;
};

// One CTA's work: kN / 8 tiles of weights, from first_n on, on up to two tiles of rows.
struct WgmmaItem {
  int32_t matrix;  // part or expert
  int32_t first_tile, m_tiles, first_n;
};

// Two neighbouring columns of a row of `columns`, together where that keeps them aligned.
__device__ inline void store_two(float* row, int32_t column, int32_t columns, float a, float b) {
  if (columns % 2 == 0) {
    if (column < columns) *reinterpret_cast<float2*>(row + column) = {a, b};
  } else {
    if (column < columns) row[column] = a;
    if (column + 1 < columns) row[column + 1] = b;
  }
}
// As far as there are, else any. `row` may be null: zeros.
__device__ inline float2 load_two(const float* row, int32_t column, int32_t columns) {
  if (row == nullptr) return {0.0f, 0.0f};
  if (columns % 2 == 0) return *reinterpret_cast<const float2*>(row + min(column, columns - 2));
  return {row[min(column, columns - 1)], row[min(column + 1, columns - 1)]};
}

// ---------------------------------------------------------------- what is multiplied

struct WgmmaLinear {
  struct Part {
    const uint8_t* tiles;
    const float* bias;
    float* out;
    int32_t rows, num_tiles;
  };
  Part parts[3];
  int32_t num_parts, pairs;
  uint32_t tile_bytes;
  WideRows x;
  int64_t rows;
  bool add;

  template <int kN>
  __host__ __device__ int n_items(int part) const {
    return (parts[part].num_tiles + kN / 8 - 1) / (kN / 8);
  }
  __host__ __device__ int m_items() const { return static_cast<int>((rows + 2 * kRows - 1) / (2 * kRows)); }
  template <int kN>
  __host__ __device__ int items() const {
    int n = 0;
    for (int i = 0; i < num_parts; ++i) n += n_items<kN>(i);
    return n * m_items();
  }
  // CTAs that follow one another share weights.
  template <int kN>
  __device__ WgmmaItem item(int i) const {
    const int m = i % m_items(), tiles = static_cast<int>((rows + kRows - 1) / kRows);
    int n = i / m_items(), part = 0;
    while (part + 1 < num_parts && n >= n_items<kN>(part)) n -= n_items<kN>(part++);
    return {part, 2 * m, min(2, tiles - 2 * m), n * (kN / 8)};
  }
  // Past the last tile: any, its sums are not stored.
  __device__ const uint8_t* tile(const WgmmaItem& item, int n) const {
    const Part& part = parts[item.matrix];
    return part.tiles + int64_t{min(item.first_n + n, part.num_tiles - 1)} * tile_bytes;
  }
  // Rows `row` and row + 8 of the item's, and columns 2t and 2t + 1 of each tile. What is read is read before
  // anything is stored, all at once: an item has this wait once.
  template <int kN>
  __device__ void store(const WgmmaItem& item, int row, int t, const float (&total)[kN / 2]) const {
    const Part& part = parts[item.matrix];
    const int32_t first = item.first_n * kTileRows + 2 * t;
    float2 bias[kN / 8];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) bias[j] = load_two(part.bias, first + 8 * j, part.rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = int64_t{item.first_tile} * kRows + row + half * 8;
      if (token >= rows) continue;
      float* out = part.out + token * part.rows;
      float2 old[kN / 8] = {};
      if (add) {
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) old[j] = load_two(out, first + 8 * j, part.rows);
      }
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const float a = total[4 * j + 2 * half] + bias[j].x, b = total[4 * j + 2 * half + 1] + bias[j].y;
        store_two(out, first + 8 * j, part.rows, add ? old[j].x + a : a, add ? old[j].y + b : b);
      }
    }
  }
};

template <bool kGateUp>
struct WgmmaExperts {
  WideExperts op;
  WideRows x;
  int32_t pairs;

  // Gate and up alternate in tiles, so that a lane holds both.
  template <int kN>
  static constexpr int kTiles = kGateUp ? kN / 16 : kN / 8;
  template <int kN>
  __device__ int n_items() const {
    return (op.gate.tiles_per_expert + kTiles<kN> - 1) / kTiles<kN>;
  }
  template <int kN>
  __device__ int items() const {
    return *op.groups.num_chunks * n_items<kN>();
  }
  // CTAs that follow one another share activations; the chunks of an expert, its weights.
  template <int kN>
  __device__ WgmmaItem item(int i) const {
    const int32_t* chunk = op.groups.chunks + 3 * (i / n_items<kN>());
    return {chunk[0], chunk[1], chunk[2], i % n_items<kN>() * kTiles<kN>};
  }
  __device__ const uint8_t* tile(const WgmmaItem& item, int n) const {
    const PackedMatrix& w = kGateUp && n % 2 == 1 ? op.up : op.gate;
    const int tile = min(item.first_n + (kGateUp ? n / 2 : n), w.tiles_per_expert - 1);
    return w.tiles + (int64_t{item.matrix} * w.tiles_per_expert + tile) * w.tile_bytes;
  }
  template <int kN>
  __device__ void store(const WgmmaItem& item, int row, int t, const float (&total)[kN / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int32_t first = item.first_n * kTileRows + 2 * t;
    const int32_t* order = op.groups.order + int64_t{item.first_tile} * kRows + row;
    const int32_t pair[2] = {order[0], order[8]};
    const auto biases = [&](const float* bias) {
      return bias != nullptr ? bias + int64_t{item.matrix} * columns : nullptr;
    };
    // All at once, as WgmmaLinear does.
    float2 gate_bias[kTiles<kN>], up_bias[kTiles<kN>];
#pragma unroll
    for (int n = 0; n < kTiles<kN>; ++n) {
      gate_bias[n] = load_two(biases(op.gate_bias), first + 8 * n, columns);
      if (kGateUp) up_bias[n] = load_two(biases(op.up_bias), first + 8 * n, columns);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (pair[half] < 0) continue;
      float* out = op.out + int64_t{pair[half]} * columns;
#pragma unroll
      for (int n = 0; n < kTiles<kN>; ++n) {
        const int at = 4 * (kGateUp ? 2 * n : n) + 2 * half;
        float a = total[at] + gate_bias[n].x, b = total[at + 1] + gate_bias[n].y;
        if constexpr (kGateUp) {
          a = activate(op.activation, a, total[at + 4] + up_bias[n].x);
          b = activate(op.activation, b, total[at + 5] + up_bias[n].y);
        }
        store_two(out, first + 8 * n, columns, a, b);
      }
    }
  }
};

#ifdef MILLRACE_HAS_WGMMA

// ---------------------------------------------------------------- the ring

template <PackedFormat kFormat, int kN>
struct WgmmaRing {
  using Shared = WgmmaShared<kFormat, kN>;
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
template <PackedFormat kFormat>
struct RawPair;

// As bf16, times the scale over 2^64: the largest and smallest scales a model may have then fit (2^64 is
// given back in the activations' scales).
inline constexpr float kScaleOffset = 18446744073709551616.0f;

template <>
struct RawPair<PackedFormat::kMx4> {
  uint2 codes;
  uint32_t scales;

  __device__ void load(const uint8_t* pair_codes, const uint8_t* pair_scales, int lane) {
    codes = reinterpret_cast<const uint2*>(pair_codes)[lane];
    scales = reinterpret_cast<const uint16_t*>(pair_scales)[lane / 4];
  }
  __device__ uint4 block(bool odd) const {
    const uint32_t w = odd ? codes.y : codes.x;
    // Back to sign and magnitude: where w's fourth bit is set, the sum has the magnitude (packed.h).
    const uint32_t signs = w & kNegativeSelectors, negative = signs - (signs >> 3);
    const uint32_t e2m1 = (w & ~negative) | ((w + kNegativeSelectors) & negative);
    const uint32_t exponent = min((odd ? scales >> 8 : scales & 255u) + 63u, 255u) << 7;
    const uint32_t scale = exponent * 0x10001u;
    return {spread(e2m1 << 12, scale), spread(e2m1 << 8, scale), spread(e2m1 << 4, scale),
            spread(e2m1, scale)};
  }

 private:
  // The codes in bits 12-15 and 28-31: their exponents are the lowest two bits of a bf16's, which makes them
  // 2^-126 times what they mean, zero and one half included.
  __device__ static uint32_t spread(uint32_t codes, uint32_t scale) {
    const uint32_t bits = (codes & 0x80008000u) | ((codes & 0x70007000u) >> 6);
    const __nv_bfloat162 v = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits),
                                     *reinterpret_cast<const __nv_bfloat162*>(&scale));
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

template <>
struct RawPair<PackedFormat::kQ8> {
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

template <PackedFormat kFormat, int kN, class Problem>
class Producer {
 public:
  using Stage = WgmmaStage<kN>;
  using Slot = RawSlot<kFormat, kN>;
  using Raw = RawPair<kFormat>;
  static constexpr int kTiles = Slot::kTiles;

  __device__ void run(const Problem& p, WgmmaRing<kFormat, kN> ring) {
    const int thread = threadIdx.x;
    warp_ = thread / kWarpLanes, lane_ = thread % kWarpLanes;
    raw_ = ring.stages + WgmmaShared<kFormat, kN>::kRaw + warp_ * Slot::kCount * Slot::kBytes;
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
                                    const WgmmaRing<kFormat, kN>& ring) {
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
    [[maybe_unused]] auto* scales = reinterpret_cast<float*>(stage + Stage::kWeightScales);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      Raw raw;
      raw.load(codes + n * Slot::kPairs * Slot::kCodes, pair_scales + n * Slot::kPairs * Slot::kScales,
               lane_);
      const int row = (warp_ * kTiles + n) * kTileRows + g;
      uint8_t* to = stage + Stage::kWeights + row * ptx::kSwizzleRowBytes;
      *reinterpret_cast<uint4*>(to + first) = raw.block(odd);
      *reinterpret_cast<uint4*>(to + (first ^ 64)) = raw.block(!odd);
      if constexpr (kFormat == PackedFormat::kQ8) {
        const int at = g / 2 * Stage::kLaneScales + row / 8 * 2 + g % 2;
        if (t < 2) scales[t * Stage::kBlockScales + at] = raw.scale(t == 1);
      }
    }
  }

  int warp_, lane_;
  uint8_t* raw_;
  uint64_t* raw_full_;
  uint32_t asked_ = 0, taken_ = 0;  // slots
};

// ---------------------------------------------------------------- multiplying

template <PackedFormat kFormat, int kN, class Problem>
class Consumer {
 public:
  using Stage = WgmmaStage<kN>;

  __device__ void run(const Problem& p, WgmmaRing<kFormat, kN> ring, int me) {
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
    [[maybe_unused]] const auto* scales =
        reinterpret_cast<const float4*>(stage + Stage::kWeightScales + t * Stage::kLaneScales * 4);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float d[kN / 2];
      ptx::wgmma_fence();
      product(d, a + 4 * block, b + 4 * block, false);
      product(d, a + 4 * block + 2, b + 4 * block + 2, true);
      ptx::wgmma_commit();
      float low = row_scales[block * kRows], high = row_scales[block * kRows + 8];
      if constexpr (kFormat == PackedFormat::kMx4) {
        low *= kScaleOffset, high *= kScaleOffset;
        ptx::wgmma_wait<0>();
        ptx::hold_sums(d);
#pragma unroll
        for (int j = 0; j < kN / 2; ++j) sum[j] = fmaf(d[j], j % 4 < 2 ? low : high, sum[j]);
      } else {
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
  }

  __device__ static void product(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (kFormat == PackedFormat::kMx4) {
      ptx::wgmma_bf16(d, a, b, accumulate);
    } else {
      ptx::wgmma_f16(d, a, b, accumulate);
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

template <PackedFormat kFormat, int kN, class Problem>
__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  WgmmaRing<kFormat, kN> ring(shared);
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  ptx::wait_for_previous();
  const int group = threadIdx.x / kGroupThreads;
  if (group < kProducers) {
    ptx::fewer_registers<kProducerRegisters>();
    Producer<kFormat, kN, Problem>().run(p, ring);
  } else {
    ptx::more_registers<kConsumerRegisters>();
    Consumer<kFormat, kN, Problem>().run(p, ring, group - kProducers);
  }
#else
  __trap();
#endif
}

template <PackedFormat kFormat, int kN, class Problem>
void launch_as(const Problem& p, int64_t items, cudaStream_t stream) {
  const auto kernel = wgmma_kernel<kFormat, kN, Problem>;
  constexpr size_t kShared = WgmmaShared<kFormat, kN>::kBytes;
  allow_shared_memory(kernel, kShared);
  const int64_t ctas = items < multiprocessors() ? items : multiprocessors();
  launch_dependent("wgmma_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, kShared, stream, p);
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <PackedFormat kFormat>
void launch_linear_for(const WgmmaLinear& p, cudaStream_t stream) {
  if (p.items<128>() < multiprocessors()) return launch_as<kFormat, 64>(p, p.items<64>(), stream);
  launch_as<kFormat, 128>(p, p.items<128>(), stream);
}

template <PackedFormat kFormat, bool kGateUp>
void launch_experts_for(const WideExperts& op, cudaStream_t stream) {
  const WgmmaExperts<kGateUp> p{op, op.x, op.gate.pairs};
  const int64_t items = divide_up(op.gate.tiles_per_expert, kGateUp ? 8 : 16) * op.groups.max_chunks;
  launch_as<kFormat, 128>(p, items, stream);
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
  if (op.parts[0].w.format == PackedFormat::kMx4) return launch_linear_for<PackedFormat::kMx4>(p, stream);
  launch_linear_for<PackedFormat::kQ8>(p, stream);
}

void launch_wgmma_experts(const WideExperts& op, cudaStream_t stream) {
  const bool gate_up = op.up.format != PackedFormat::kNone;
  if (op.gate.format == PackedFormat::kMx4) {
    return gate_up ? launch_experts_for<PackedFormat::kMx4, true>(op, stream)
                   : launch_experts_for<PackedFormat::kMx4, false>(op, stream);
  }
  gate_up ? launch_experts_for<PackedFormat::kQ8, true>(op, stream)
          : launch_experts_for<PackedFormat::kQ8, false>(op, stream);
}

bool has_wgmma() {
  static const bool has = [] {
    cudaFuncAttributes attributes{};
    check_call(cudaFuncGetAttributes(&attributes, wgmma_kernel<PackedFormat::kQ8, 64, WgmmaLinear>),
               "cudaFuncGetAttributes");
    // Without sm_90a in the build the kernel is a trap, which takes few registers.
    return attributes.binaryVersion == 90 && attributes.numRegs > 64;
  }();
  return has;
}

}  // namespace millrace::cuda
