// GEMV of 8-bit matrices whose tiles all fit shared memory, or of very many tiles: q, k, v and the projection
// of a small model, logits. The bits are those of dense.cu, which has the other shapes.
//
// A CTA is sixteen warps, one per split-K segment (tile/weight_format.cuh). Tiles of 8 rows pass whole
// through a ring of stages in shared memory: one copy a tile, where dense.cu has one a warp. Where all tiles
// of the CTA fit, they are all on their way before it waits for the kernel before. Rows of activations lie in
// shared memory as bf16; the product's columns are tokens. Where the ring is deep enough, two tiles make the
// 16 rows of a product.
//
// Roofline: the tiles' bytes at B = 4.3 TB/s (measured copy of an H200). Stages of some 100 KB are twice what
// latency x bandwidth needs. Of 8-bit weights a pair of blocks is some 40 instructions of a warp: a tile of
// 2,880 columns takes a third of the time in which it is loaded. What is left over the floor is the start:
// the row's norm, under which the first stages arrive.
#include <algorithm>

#include "kernels/cuda/gemv/dense_tiles.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gemv/row.cuh"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = kSplitK;
constexpr int kThreads = kWarps * kWarpLanes;
static_assert(kThreads == kRoundThreads);
constexpr int kProducerThread = kThreads - kWarpLanes;  // of the warp whose segment is the shortest
constexpr int kRoundTiles = 8;  // tiles whose partial sums are kept before they are added up
constexpr int kStagesByTwo =
    6;  // of a ring in which two tiles may be read at once: the others are being loaded

struct Params {
  Gemv op;
  GemvLayout layout;
  int32_t total_tiles, cols, k_steps;
  uint32_t tile_bytes;
  bool whole;      // all tiles of a CTA are in the ring at once: no stage is used twice
  bool two_tiles;  // two tiles make the 16 rows of a product
};

// One output of a round; bias and residual are loaded before the round's tiles are multiplied.
struct Output {
  float* to = nullptr;
  float bias = 0.0f, old = 0.0f;
};
// Output i of the `count` tiles from `first` on: [tile][8 rows][tokens].
__device__ inline Output load_output(const Params& p, int first, int count, int i) {
  Output out;
  const int tokens = p.op.tokens, values = kTileRows * tokens;
  if (i >= count * values) return out;
  const GemvTile tile = find_tile(p.op, first + i / values);
  const int64_t row = tile.tile * kTileRows + i % values / tokens;
  if (row >= tile.part->w.rows) return out;
  out.to = tile.part->out + i % tokens * tile.part->w.rows + row;
  if (tile.part->bias != nullptr) out.bias = __ldg(tile.part->bias + row);
  if (p.op.add) out.old = __ldcg(out.to);
  return out;
}

// sum of a product's rows g and g + 8 for tokens 2t and 2t + 1, kept for the tile(s).
template <bool kTwo>
__device__ inline void store_partial(float* partial, const float (&sum)[4], int tokens, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * t + i;
    if (token >= tokens) continue;
    partial[g * tokens + token] = sum[i];
    if constexpr (kTwo) partial[(kSplitK * kTileRows + g) * tokens + token] = sum[2 + i];
  }
}

// kKSteps: those of a whole segment. kTokens: at most so many.
template <PackedFormat kFormat, int kKSteps, int kTokens>
__global__ void __launch_bounds__(kThreads, 2) gemv_tiles_kernel(const __grid_constant__ Params p) {
  using Format = TileFormat<kFormat>;
  extern __shared__ __align__(128) uint8_t shared[];
  Ring ring = p.layout.ring(shared, kWarps);
  float* partial = p.layout.partial(shared);  // [tile][segment][8 rows][tokens]
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int first = static_cast<int>(int64_t{blockIdx.x} * p.total_tiles / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * p.total_tiles / gridDim.x);
  Producer producer(ring, last - first, [&](const Ring& stage, int i) {
    const GemvTile tile = find_tile(p.op, first + i);
    stage.acquire(p.tile_bytes);
    stage.copy(0, tile.part->w.tiles + int64_t{tile.tile} * p.tile_bytes, p.tile_bytes);
  });
  if (warp == kWarps - 1) {
    if (lane == 0) ring.init();
    __syncwarp();                 // the warp waits for the barriers' init
    producer.fill_by_warp(lane);  // weights wait for nobody
  }
  ptx::let_dependents_start();
  RowQuads norm_weight;
  norm_weight.load<false>(p.op.norm_weight, p.cols / 4);
  __syncthreads();  // all wait for the barriers' init
  ptx::wait_for_previous();
  const int tokens = p.op.tokens, values = kTileRows * tokens;
  uint8_t* rows = p.layout.rows(shared);
  const uint32_t stride = gemv_row_stride(p.k_steps);
  const auto row = [&](int t) {
    return p.op.x + (p.op.source_rows != nullptr ? p.op.source_rows[t] : t) * int64_t{p.cols};
  };
  const auto store = [&](int t, int i, uint2 words) {
    reinterpret_cast<uint2*>(rows + static_cast<uint32_t>(t) * stride)[i] = words;
  };
  round_rows<kTokens>(tokens, row, p.op.norm_weight, norm_weight, p.op.eps, p.cols, partial, store);
  __syncthreads();  // all wait for the rows as bf16

  const WarpSegment segment(p.k_steps, warp);
  const int token = activation_row<kFormat>(lane);
  const uint8_t* x = rows + (token < tokens ? token : 0) * stride + segment.first * (kKStepColumns * 2);
  const int in_stage = segment.first * Format::kKStepBytes;
  for (int u0 = first; u0 < last; u0 += kRoundTiles) {
    const int count = min(kRoundTiles, last - u0);
    const Output out = load_output(p, u0, count, threadIdx.x);
    for (int n = 0; n < count;) {
      const uint8_t* tile = ring.wait_full() + in_stage;
      float* to = partial + (n * kSplitK + warp) * values;
      float sum[4] = {};
      if (p.two_tiles && n + 1 < count) {
        const Ring first_of_two = ring;
        ring.advance();
        multiply_segment<kFormat, kKSteps, true>(tile, ring.wait_full() + in_stage, x, segment.count, lane,
                                                 sum);
        if (!p.whole) first_of_two.release(lane), ring.release(lane);
        store_partial<true>(to, sum, tokens, lane);
        if (!p.whole && threadIdx.x == kProducerThread) {  // the stages of the two tiles before these
          producer.refill(u0 - first + n - 1);
          producer.refill(u0 - first + n);
        }
        __syncwarp();
        n += 2;
      } else {
        multiply_segment<kFormat, kKSteps, false>(tile, tile, x, segment.count, lane, sum);
        ring.release(lane);
        store_partial<false>(to, sum, tokens, lane);
        if (threadIdx.x == kProducerThread) producer.refill(u0 - first + n);
        __syncwarp();  // nobody of the producer's warp spins for an item that has yet to be loaded
        ++n;
      }
      ring.advance();
    }
    __syncthreads();  // all wait for the round's partial sums
    if (out.to != nullptr) {
      const float* mine = partial + threadIdx.x / values * kSplitK * values + threadIdx.x % values;
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSplitK; ++s) sum += mine[s * values];
      const float value = sum * Format::kUnscale + out.bias;
      *out.to = p.op.add ? out.old + value : value;
    }
    if (u0 + kRoundTiles < last) __syncthreads();  // nobody writes the next round's before these are read
  }
}
static_assert(kRoundTiles * kTileRows * kMaxGemvRows <= kThreads);  // an output per thread

template <PackedFormat kFormat, int kKSteps, int kTokens>
void launch(const Params& p, const Launch& at) {
  const auto kernel = gemv_tiles_kernel<kFormat, kKSteps, kTokens>;
  allow_shared_memory(kernel, p.layout.total());
  const int ctas = p.total_tiles < at.device.sm_count() ? p.total_tiles : at.device.sm_count();
  launch_dependent("gemv_tiles_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, p.layout.total(),
                   at, p);
}

template <PackedFormat kFormat, int kKSteps>
void launch_for_tokens(const Params& p, const Launch& at) {
  p.op.tokens == 1 ? launch<kFormat, kKSteps, 1>(p, at) : launch<kFormat, kKSteps, kMaxGemvRows>(p, at);
}
constexpr int64_t kAllBytes = 135000;  // beside this much a kernel of kRingBytes has room

// For so many tiles of a CTA.
GemvLayout layout_of(const PackedMatrix& w, int32_t tokens, int64_t tiles, const Device& device,
                     uint32_t deep_bytes = kDeepBytes) {
  const uint32_t rows_bytes = static_cast<uint32_t>(tokens) * gemv_row_stride(w.k_steps);
  const uint32_t partial_bytes =
      kRoundTiles * kSplitK * kTileRows * static_cast<uint32_t>(tokens) * sizeof(float);
  GemvLayout layout =
      gemv_layout(w.tile_bytes, tiles, rows_bytes, partial_bytes, device, kRingBytes, deep_bytes);
  const int64_t limit = std::min(kAllBytes, int64_t{device.max_shared_memory()});
  if (layout.stages > 0 && tiles <= kMaxStages &&
      layout.total() + (tiles - layout.stages) * layout.stage_bytes <= limit) {
    layout.stages = static_cast<int32_t>(tiles);
  }
  return layout;
}

// The most that a CTA gets.
int64_t tiles_per_cta(const Gemv& op, const Device& device) {
  int64_t tiles = 0;
  for (int i = 0; i < op.num_parts; ++i) tiles += op.parts[i].w.tiles_per_expert;
  const int64_t ctas = std::min<int64_t>(tiles, device.sm_count());
  return ctas == 0 ? 0 : (tiles + ctas - 1) / ctas;
}

}  // namespace

bool prefers_gemv_tiles(const Gemv& op, const Device& device) {
  const PackedMatrix& w = op.parts[0].w;
  const int per_segment = k_steps_per_segment(w.k_steps);
  if (w.format != PackedFormat::kQ8 || op.act != nullptr || op.x_bf16 != nullptr) return false;
  if (per_segment != 3 && per_segment != 4) return false;
  const int64_t tiles = tiles_per_cta(op, device);
  const int32_t stages = layout_of(w, op.tokens, tiles, device).stages;
  return tiles >= kManyItems ? stages >= kStagesByTwo : stages > 0 && stages >= tiles;
}

void launch_gemv_tiles(const Gemv& op, uint32_t ring_bytes, const Launch& at) {
  const PackedMatrix& w = op.parts[0].w;
  Params p{op, {}, 0, static_cast<int32_t>(w.cols), w.k_steps, w.tile_bytes, false, false};
  for (int i = 0; i < op.num_parts; ++i) p.total_tiles += op.parts[i].w.tiles_per_expert;
  const int64_t tiles = tiles_per_cta(op, at.device);
  p.layout = layout_of(w, op.tokens, tiles, at.device, ring_bytes > 0 ? ring_bytes : kDeepBytes);
  p.whole = p.layout.stages >= tiles;
  p.two_tiles = p.whole || p.layout.stages >= kStagesByTwo;
  if (k_steps_per_segment(p.k_steps) == 3) return launch_for_tokens<PackedFormat::kQ8, 3>(p, at);
  launch_for_tokens<PackedFormat::kQ8, 4>(p, at);
}

}  // namespace millrace::cuda
