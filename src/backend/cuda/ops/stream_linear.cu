// Products of one to four rows with packed matrices: norm, QKV, output projection, logits.
//
// Roofline: B = 4.3 TB/s (measured copy of an H200); a CTA per SM streams its tiles of 8 rows through about
// 100 KB of stages, twice what latency x bandwidth asks for, and computes at several times the rate at which
// they come (per 16 weights of a lane one wide load, one tensor core instruction and some eight others). What
// is left over the floor is the start: the row's norm and its codes, about a microsecond, under which the
// first stages arrive.
#include "backend/cuda/ops/launch.cuh"
#include "backend/cuda/ops/stream.h"
#include "backend/cuda/ops/tile_stream.cuh"

namespace millrace::cuda {
namespace {

struct Params {
  StreamLinear op;
  StreamShape shape;
  int32_t total_tiles, cols, pairs;
  uint32_t tile_bytes;
};

struct Tile {
  const StreamLinear::Part* part;
  int tile;
};
__device__ inline Tile find_tile(const StreamLinear& op, int tile) {
  int i = 0;
  while (i + 1 < op.num_parts && tile >= op.parts[i].w.tiles_per_expert)
    tile -= op.parts[i++].w.tiles_per_expert;
  return {&op.parts[i], tile};
}

// One output of a round, asked for before the round's tiles are multiplied, so that bias and residual are
// there.
struct Output {
  float* to = nullptr;
  float bias = 0.0f, old = 0.0f;
};
// Output i of the `count` tiles from `first` on: [tile][8 rows][tokens].
__device__ inline Output find_output(const Params& p, int first, int count, int i) {
  Output out;
  const int tokens = p.op.tokens, values = kTileRows * tokens;
  if (i >= count * values) return out;
  const Tile tile = find_tile(p.op, first + i / values);
  const int64_t row = tile.tile * kTileRows + i % values / tokens;
  if (row >= tile.part->w.rows) return out;
  out.to = tile.part->out + i % tokens * tile.part->w.rows + row;
  if (tile.part->bias != nullptr) out.bias = __ldg(tile.part->bias + row);
  if (p.op.add) out.old = __ldcg(out.to);
  return out;
}

// kPairs: pairs of a segment whose activations a lane holds; 0: it reads them from shared memory every time.
template <int kPairs>
__global__ void __launch_bounds__(kComputeThreads, 2) stream_linear_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  Ring ring = p.shape.ring(shared);
  float* partial = p.shape.partial(shared);  // [tile][segment][8 rows][tokens]
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int first = static_cast<int>(int64_t{blockIdx.x} * p.total_tiles / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * p.total_tiles / gridDim.x);
  Feeder feeder(ring, last - first, [&](const Ring& stage, int i) {
    const Tile tile = find_tile(p.op, first + i);
    stage.claim(p.tile_bytes);
    stage.copy(0, tile.part->w.tiles + static_cast<int64_t>(tile.tile) * p.tile_bytes, p.tile_bytes);
  });
  if (threadIdx.x == 0) {
    ring.init();
    feeder.fill();  // weights wait for nobody
  }
  ptx::let_dependents_start();
  HeldQuads norm_weight;
  norm_weight.load<false>(reinterpret_cast<const float4*>(p.op.norm_weight), p.cols / 4, threadIdx.x);
  __syncthreads();  // the barriers are there before anybody uses them
  ptx::wait_for_previous();
  const int tokens = p.op.tokens, values = kTileRows * tokens;
  const QuantizedRows x = quantized_rows(p.shape.rows(shared), tokens, p.pairs);
  for (int t = 0; t < tokens; ++t) {
    const int64_t row = p.op.source_rows != nullptr ? p.op.source_rows[t] : t;
    quantize_row<kComputeBarrier>(
        p.op.x + row * p.cols, p.op.norm_weight, norm_weight, p.op.eps, p.cols, threadIdx.x,
        p.shape.scratch(shared),
        [&](int i, float4, const QuantizedQuad& q) { store_quad(x, int64_t{t} * p.pairs, i, q); });
  }
  __syncthreads();  // the rows are quantized

  const WarpColumns columns(p.pairs, warp);
  constexpr int kHeld = kPairs > 0 ? kPairs : 1;
  HeldActivations<kHeld> held;
  if constexpr (kPairs > 0) held.template load<false>(x, 0, tokens, p.pairs, columns, lane);
  for (int u0 = first; u0 < last; u0 += kRoundStages) {
    const int count = min(kRoundStages, last - u0);
    const Output out = find_output(p, u0, count, threadIdx.x);
    for (int n = 0; n < count; ++n) {
      const uint8_t* tile = ring.wait_full();
      float2 sum;
      if constexpr (kPairs > 0) {
        sum = held.multiply(tile, p.pairs, columns, lane);
      } else {
        sum = multiply_from(tile, p.pairs, columns, lane, x, 0, tokens);
      }
      ring.release(lane);
      ring.advance();
      if (threadIdx.x == 0) feeder.refill(u0 - first + n);
      __syncwarp();  // nobody of warp 0 spins for a piece that thread 0 has yet to ask for
      if (lane % 4 < tokens) {
        float* to = partial + (n * kSegments + 2 * warp) * values + lane / 4 * tokens + lane % 4;
        to[0] = sum.x;
        to[values] = sum.y;
      }
    }
    __syncthreads();  // all partial sums of the round are there
    if (out.to != nullptr) {
      const float* mine = partial + threadIdx.x / values * kSegments * values + threadIdx.x % values;
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) sum += mine[s * values];
      const float value = sum + out.bias;
      *out.to = p.op.add ? out.old + value : value;
    }
    if (u0 + kRoundStages < last) __syncthreads();  // and read, before the next round's
  }
}
static_assert(kRoundStages * kTileRows * kMaxStreamTokens <= kComputeThreads);  // an output per thread

template <int kPairs>
void launch(const Params& p, cudaStream_t stream) {
  const auto kernel = stream_linear_kernel<kPairs>;
  allow_shared_memory(kernel, p.shape.total());
  const int ctas = p.total_tiles < multiprocessors() ? p.total_tiles : multiprocessors();
  launch_dependent("stream_linear_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kComputeThreads,
                   p.shape.total(), stream, p);
}

void launch_for_pairs(const Params& p, cudaStream_t stream) {
  const int per = pairs_per_segment(p.pairs);
  if (per <= 3) return launch<3>(p, stream);
  if (per <= 4) return launch<4>(p, stream);
  launch<0>(p, stream);
}

StreamShape shape_of(uint32_t tile_bytes, int32_t pairs, int32_t tokens, int64_t most) {
  const auto rows_bytes = static_cast<uint32_t>(tokens) * static_cast<uint32_t>(pairs) * kRowPairBytes;
  const uint32_t partial_bytes =
      kRoundStages * kSegments * kTileRows * static_cast<uint32_t>(tokens) * sizeof(float);
  return stream_shape(tile_bytes, most, rows_bytes, partial_bytes);
}

}  // namespace

int multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    MILLRACE_CUDA_TRY(cudaGetDevice(&device));
    MILLRACE_CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
    return value;
  }();
  return count;
}

bool fits_streaming(const PackedMatrix& w) {
  if (w.format != PackedFormat::kQ8) return false;
  const StreamShape shape = shape_of(w.tile_bytes, w.pairs, kMaxStreamTokens, 2);
  return shape.stages == 2;
}

void launch_stream_linear(const StreamLinear& op, cudaStream_t stream) {
  if (op.tokens == 0) return;
  Params p{
      op, {}, 0, static_cast<int32_t>(op.parts[0].w.cols), op.parts[0].w.pairs, op.parts[0].w.tile_bytes};
  for (int i = 0; i < op.num_parts; ++i) p.total_tiles += op.parts[i].w.tiles_per_expert;
  if (p.total_tiles == 0) return;
  const int64_t ctas = p.total_tiles < multiprocessors() ? p.total_tiles : multiprocessors();
  p.shape = shape_of(p.tile_bytes, p.pairs, op.tokens, (p.total_tiles + ctas - 1) / ctas);
  launch_for_pairs(p, stream);
}

}  // namespace millrace::cuda
