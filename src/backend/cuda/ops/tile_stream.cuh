// What the streaming kernels share: a CTA of eight warps through whose shared memory tiles of packed weights
// (packed.h) pass in a ring of stages, brought by bulk copies that thread 0 asks for. Each warp owns two
// segments of the columns, in every tile, so its share of the activations stays in registers; what the
// sixteen segments give is added up in order.
//
// Registers and shared memory leave room for two CTAs per SM: while one finishes, the next kernel's
// (programmatic dependent launch) already has its first stages under way.
#pragma once

#include <cuda_fp16.h>

#include "backend/cuda/device.h"
#include "backend/cuda/ops/packed.h"
#include "backend/cuda/ops/quantize.cuh"
#include "backend/cuda/ops/stream.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/permute.cuh"

namespace millrace::cuda {

inline constexpr int kComputeWarps = 8;
inline constexpr int kWarpSegments = kSegments / kComputeWarps;
static_assert(kWarpSegments == 2);
inline constexpr int kComputeThreads = kComputeWarps * kWarpLanes;
static_assert(kComputeThreads == kRowThreads);
inline constexpr int kMaxStages = 16;
inline constexpr int kRoundStages = 8;  // stages whose partial sums are kept before they are added up
inline constexpr int kComputeBarrier = 1;
inline constexpr int kMaxStreamTokens = kMaxStreamRows;  // two columns of the product each

// The scales of both blocks of row g.
__device__ inline float2 load_scales(const uint8_t* tile, int pairs, int pair, int lane) {
  return __half22float2(*reinterpret_cast<const __half2*>(tile + pairs * 512 + (pair * 8 + lane / 4) * 4));
}

// A lane's activations of one pair. As the B operand column 2i holds token i's even and column 2i + 1 its odd
// block, so that c[0] is row g of the even and c[3] of the odd block, for token t.
struct LaneActivations {
  uint32_t b[2];
  float2 scale;
};

// Rows [row, row + count) of the planes, count <= 4.
template <bool kGlobal>
__device__ inline LaneActivations load_activations(const QuantizedRows& x, int row, int count, int pairs,
                                                   int pair, int lane) {
  LaneActivations a{{0u, 0u}, {0.0f, 0.0f}};
  const int g = lane / 4, t = lane % 4;
  if (g / 2 < count) {
    const auto* from = reinterpret_cast<const uint2*>(x.codes) +
                       (static_cast<int64_t>(row + g / 2) * pairs + pair) * 8 + g % 2 * 4 + t;
    const uint2 words = kGlobal ? __ldcg(from) : *from;
    a.b[0] = words.x, a.b[1] = words.y;
  }
  if (t < count) {
    const int64_t at = static_cast<int64_t>(row + t) * pairs + pair;
    const auto* scales = reinterpret_cast<const float2*>(x.scales) + at;
    a.scale = kGlobal ? __ldcg(scales) : *scales;
  }
  return a;
}

// sum += row g of the pair . token t, the even block first.
__device__ inline void multiply_pair(const uint8_t* tile, int pairs, int pair, int lane,
                                     const LaneActivations& x, float& sum) {
  const float2 scale = load_scales(tile, pairs, pair, lane);
  constexpr int32_t kStart[4] = {kFloatBits, kFloatBits, kFloatBits, kFloatBits};
  int32_t c[4];
  const uint4 words = *reinterpret_cast<const uint4*>(tile + pair * 512 + lane * 16);
  const uint32_t a[4] = {words.x, words.y, words.z, words.w};
  ptx::mma_s8(c, a, x.b, kStart);
  sum = fmaf(__int_as_float(c[0]) - kFloatOffset, scale.x * x.scale.x, sum);
  sum = fmaf(__int_as_float(c[3]) - kFloatOffset, scale.y * x.scale.y, sum);
}

// A warp's two segments of every tile: pairs [begin, middle) and [middle, end).
struct WarpColumns {
  int begin, middle, end;
  __device__ WarpColumns(int pairs, int warp) {
    const int per = pairs_per_segment(pairs);
    begin = min(2 * warp * per, pairs);
    middle = min(begin + per, pairs);
    end = min(middle + per, pairs);
  }
};

// The activations of a warp's columns, kPairs pairs per segment, in registers.
template <int kPairs>
struct HeldActivations {
  LaneActivations x[2][kPairs];

  // Rows [row, row + count) of the planes.
  template <bool kGlobal>
  __device__ void load(const QuantizedRows& planes, int row, int count, int pairs, const WarpColumns& c,
                       int lane) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (c.begin + j < c.middle) {
        x[0][j] = load_activations<kGlobal>(planes, row, count, pairs, c.begin + j, lane);
      }
      if (c.middle + j < c.end) {
        x[1][j] = load_activations<kGlobal>(planes, row, count, pairs, c.middle + j, lane);
      }
    }
  }

  // Both segments of one tile. Without a branch where the columns are whole, so that loads, lookups and
  // products of different pairs overlap.
  __device__ float2 multiply(const uint8_t* tile, int pairs, const WarpColumns& c, int lane) const {
    float2 sum = {0.0f, 0.0f};
    if (c.end == c.begin + 2 * kPairs) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        multiply_pair(tile, pairs, c.begin + j, lane, x[0][j], sum.x);
        multiply_pair(tile, pairs, c.begin + kPairs + j, lane, x[1][j], sum.y);
      }
      return sum;
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (c.begin + j < c.middle) multiply_pair(tile, pairs, c.begin + j, lane, x[0][j], sum.x);
      if (c.middle + j < c.end) multiply_pair(tile, pairs, c.middle + j, lane, x[1][j], sum.y);
    }
    return sum;
  }
};

// The same with the activations read from shared memory every time: columns too many to hold.
__device__ inline float2 multiply_from(const uint8_t* tile, int pairs, const WarpColumns& c, int lane,
                                       const QuantizedRows& x, int row, int count) {
  float2 sum = {0.0f, 0.0f};
#pragma unroll 4
  for (int p = c.begin; p < c.middle; ++p) {
    const LaneActivations a = load_activations<false>(x, row, count, pairs, p, lane);
    multiply_pair(tile, pairs, p, lane, a, sum.x);
  }
#pragma unroll 4
  for (int p = c.middle; p < c.end; ++p) {
    const LaneActivations a = load_activations<false>(x, row, count, pairs, p, lane);
    multiply_pair(tile, pairs, p, lane, a, sum.y);
  }
  return sum;
}

// One row of activations, for warps that own four segments each (four warps a tile, two tiles side by side).
// The four segments take turns in the columns of one chain of products, so that lane (g, t) ends with row g
// of segment t: scales are applied once for four pairs. kPairs: pairs of a segment.
template <int kPairs>
class SingleRow {
 public:
  static constexpr int kPairBytes = 512;

  // `quarter`: of the columns. A segment past the end, or its missing pairs, are zeros times weights that are
  // there.
  template <bool kGlobal>
  __device__ void load(const QuantizedRows& x, int64_t row, int pairs, int quarter, int lane) {
    const int g = lane / 4, t = lane % 4;
    const auto* codes = reinterpret_cast<const uint2*>(x.codes) + row * pairs * 8 + g % 2 * 4 + t;
    const auto* scales = reinterpret_cast<const float2*>(x.scales) + row * pairs;
    const int code_segment = 4 * quarter + g / 2, scale_segment = 4 * quarter + t;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int p = first_of(code_segment, pairs) + j;
      uint2 words = {0u, 0u};
      if (p / kPairs == code_segment) words = kGlobal ? __ldcg(codes + p * 8) : codes[p * 8];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        b_[j][s][0] = g / 2 == s ? words.x : 0u, b_[j][s][1] = g / 2 == s ? words.y : 0u;
      }
      const int q = first_of(scale_segment, pairs) + j;
      scale_[j] = {0.0f, 0.0f};
      if (q / kPairs == scale_segment) scale_[j] = kGlobal ? __ldcg(scales + q) : scales[q];
    }
#pragma unroll
    for (int s = 0; s < 4; ++s)
      at_[s] = first_of(4 * quarter + s, pairs) * kPairBytes + lane * (kPairBytes / 32);
    scale_at_ = pairs * kPairBytes + (first_of(scale_segment, pairs) * 8 + g) * (kPairBytes / 128);
  }

  // Row g of the tile, segment t.
  __device__ float multiply(const uint8_t* tile) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      int32_t c[4] = {kFloatBits, kFloatBits, kFloatBits, kFloatBits};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const uint4 w = *reinterpret_cast<const uint4*>(tile + at_[s] + j * kPairBytes);
        const uint32_t a[4] = {w.x, w.y, w.z, w.w};
        ptx::mma_s8(c, a, b_[j][s], c);
      }
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(tile + scale_at_ + j * 32));
      sum = fmaf(__int_as_float(c[0]) - kFloatOffset, scale.x * scale_[j].x, sum);
      sum = fmaf(__int_as_float(c[3]) - kFloatOffset, scale.y * scale_[j].y, sum);
    }
    return sum;
  }

 private:
  // Where a segment's pairs begin, or, when they are not all there, the last ones that are.
  __device__ static int first_of(int segment, int pairs) { return min(segment * kPairs, pairs - kPairs); }

  uint32_t b_[kPairs][4][2];  // the codes, in their segment's turn; zeros in the others'
  float2 scale_[kPairs];
  int at_[4], scale_at_;
};

// The ring: pieces of work go through its stages in turn. `full` completes when a stage's bytes are there,
// `empty` when all its readers have read it.
struct Ring {
  uint8_t* data;
  uint64_t *full, *empty;
  uint32_t stage_bytes;
  int stages;
  int readers;  // warps that read a piece
  // The stage and pass of whoever walks the ring: every warp has a copy of its own.
  int slot = 0;
  uint32_t pass = 0;

  __device__ void init() const {  // one thread
    for (int s = 0; s < stages; ++s) {
      ptx::barrier_init(full + s, 1);
      ptx::barrier_init(empty + s, static_cast<uint32_t>(readers));
    }
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage() const { return data + static_cast<uint32_t>(slot) * stage_bytes; }
  __device__ void advance() {
    if (++slot == stages) slot = 0, ++pass;
  }
  // Thread 0: the stage is free, and `bytes` will be copied to it.
  __device__ void claim(uint32_t bytes) const {
    if (pass > 0) ptx::barrier_wait(empty + slot, (pass - 1) & 1u);
    ptx::barrier_arrive_expect(full + slot, bytes);
  }
  __device__ void copy(uint32_t at, const uint8_t* from, uint32_t bytes) const {
    ptx::bulk_copy(stage() + at, from, bytes, full + slot);
  }
  // A warp: the piece is there.
  __device__ const uint8_t* wait_full() const {
    ptx::barrier_wait(full + slot, pass & 1u);
    return stage();
  }
  // A warp has read the piece.
  __device__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + slot);
  }
};

// Thread 0's side of the ring: asks for pieces [0, count) in order. issue(ring, i) claims the ring's stage
// and copies piece i to it.
template <class Issue>
struct Feeder {
  Ring ring;
  int count;
  Issue issue;
  int next = 0;

  __device__ Feeder(const Ring& from, int pieces, const Issue& how) : ring(from), count(pieces), issue(how) {}
  __device__ void feed() {
    issue(ring, next++);
    ring.advance();
  }
  // As many as there are stages.
  __device__ void fill() {
    while (next < count && next < ring.stages) feed();
  }
  // The same by a warp, a piece per lane: what precedes a copy takes longer than the copy. The first pass of
  // the ring waits for nobody. All lanes must call; lane 0 goes on feeding.
  __device__ void fill_by_warp(int lane) {
    const int pieces = min(count, ring.stages);
    if (lane < pieces) {
      Ring mine = ring;
      mine.slot = lane;
      issue(mine, lane);
    }
    next = pieces;
    ring.slot = pieces == ring.stages ? 0 : pieces;
    ring.pass = pieces == ring.stages ? 1 : 0;
  }
  // After this warp has read piece i: the stage of the piece before it, which the others have most likely
  // read too.
  __device__ void refill(int i) {
    if (next < count && next < i + ring.stages) feed();
  }
};

// Shared memory of a streaming CTA: the ring, quantized rows, partial sums [slots][16 segments][floats],
// barriers.
struct StreamShape {
  uint32_t stage_bytes = 0;  // a multiple of 128
  int32_t stages = 0;
  uint32_t rows_bytes = 0;     // of quantized rows, a multiple of 16
  uint32_t partial_bytes = 0;  // a multiple of 16

  __host__ __device__ uint32_t total() const {
    return stage_bytes * static_cast<uint32_t>(stages) + rows_bytes + partial_bytes + 16 * sizeof(float) +
           2 * kMaxStages * sizeof(uint64_t);
  }
  __device__ Ring ring(uint8_t* shared, int readers = kComputeWarps) const {
    auto* barriers =
        reinterpret_cast<uint64_t*>(rows(shared) + rows_bytes + partial_bytes + 16 * sizeof(float));
    return {shared, barriers, barriers + kMaxStages, stage_bytes, stages, readers};
  }
  __device__ uint8_t* rows(uint8_t* shared) const {
    return shared + stage_bytes * static_cast<uint32_t>(stages);
  }
  __device__ float* partial(uint8_t* shared) const {
    return reinterpret_cast<float*>(rows(shared) + rows_bytes);
  }
  __device__ float* scratch(uint8_t* shared) const {
    return reinterpret_cast<float*>(rows(shared) + rows_bytes + partial_bytes);
  }
};

// An SM has 228 KB, 1 KB of each CTA's is the system's. A kernel whose tiles all fit kWholeBytes takes as
// much and loads everything at once; beside it one of kRingBytes has room, so that consecutive kernels
// overlap. A kernel of many pieces (the logits) wants a deeper ring.
inline constexpr uint32_t kWholeBytes = 131500, kRingBytes = 97000, kDeepBytes = 115456, kMostBytes = 231000,
                          kMoeBytes = 129500;
inline constexpr int kManyPieces = 32;

// As many stages as fit, at most `pieces`.
inline StreamShape stream_shape(uint32_t piece_bytes, int64_t pieces, uint32_t rows_bytes,
                                uint32_t partial_bytes, uint32_t ring_bytes = kRingBytes) {
  StreamShape shape;
  shape.stage_bytes = (piece_bytes + 127) / 128 * 128;
  shape.rows_bytes = (rows_bytes + 15) / 16 * 16;
  shape.partial_bytes = partial_bytes;
  const uint32_t fixed = shape.total();
  const auto fit = [&](uint32_t limit) {
    limit = limit < most_shared_memory() ? limit : most_shared_memory();
    return limit < fixed || !has_bulk_copies() ? 0 : int64_t{(limit - fixed) / shape.stage_bytes};
  };
  int64_t stages = fit(pieces >= kManyPieces ? kDeepBytes : ring_bytes);
  if (fit(kWholeBytes) >= pieces) stages = pieces;
  if (stages < 2) stages = fit(kMostBytes);
  stages = stages < pieces ? stages : pieces;
  shape.stages = static_cast<int32_t>(stages < kMaxStages ? stages : kMaxStages);
  return shape;
}

}  // namespace millrace::cuda
