// The expert layer of one to four tokens in two kernels: gate and up with the activation, then down with the
// weighted sum. Each token streams its own experts (blockIdx.y).
//
// Roofline: the chosen tiles' bytes at B = 4.3 TB/s. Gate and up cannot begin before the router has spoken;
// down can: its first stages are under way while gate and up still compute. MXFP4 experts have kernels of
// their own: stream_mx4.cu.
#include "backend/cuda/ops/stream_experts.cuh"

namespace millrace::cuda {
namespace {

// ---------------------------------------------------------------- gate and up

// One output of a round: asked for before its tiles are multiplied, so that the biases are there.
struct GateUpOutput {
  int slot = -1;
  int64_t row = 0;
  float gate_bias = 0.0f, up_bias = 0.0f;
};
__device__ inline GateUpOutput find_gate_up(const StreamExperts& op, const Choice& choice, int first,
                                            int count) {
  GateUpOutput out;
  const int n = static_cast<int>(threadIdx.x) / kTileRows, g = threadIdx.x % kTileRows;
  if (n >= count) return out;
  const int slot = (first + n) / op.gate.tiles_per_expert, tile = (first + n) % op.gate.tiles_per_expert;
  const int64_t row = int64_t{tile} * kTileRows + g, rows = op.gate.rows;
  if (row >= rows) return out;
  const int64_t at = choice.expert[slot] * rows + row;
  out.slot = slot, out.row = row;
  if (op.gate_bias != nullptr) out.gate_bias = __ldg(op.gate_bias + at);
  if (op.up_bias != nullptr) out.up_bias = __ldg(op.up_bias + at);
  return out;
}

// A piece of work is a slot's tile of 8 gate rows with the same 8 up rows. partial [piece][segment][gate,
// up][8].
template <int kPairs>
__global__ void __launch_bounds__(kComputeThreads, 2)
    stream_gate_up_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared);
  float* partial = p.shape.partial(shared);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int total = op.k * op.gate.tiles_per_expert, pairs = op.gate.pairs;
  const int first = static_cast<int>(int64_t{blockIdx.x} * total / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * total / gridDim.x);
  Feeder feeder(ring, last - first, [&](const Ring& stage, int i) {
    const int u = first + i, tile = u % op.gate.tiles_per_expert;
    const int expert = choice.expert[u / op.gate.tiles_per_expert];
    stage.claim(2 * op.gate.tile_bytes);
    stage.copy(0, expert_tile(op.gate, expert, tile), op.gate.tile_bytes);
    stage.copy(op.gate.tile_bytes, expert_tile(op.up, expert, tile), op.gate.tile_bytes);
  });
  if (threadIdx.x == 0) ring.init();
  ptx::wait_for_previous();
  ptx::let_dependents_start();  // after the wait: the next kernel reads the scores before its own
  if (warp == 0) {
    choose(op, lane, choice);
    if (lane == 0) feeder.fill();
  }
  const QuantizedRows x = quantized_rows(const_cast<uint8_t*>(op.quantized), op.tokens, pairs);
  SingleRow<kPairs> row;
  row.template load<true>(x, blockIdx.y, pairs, warp % 4, lane);
  __syncthreads();  // the choice and the barriers are there
  constexpr int kValues = 2 * kTileRows;
  for (int u0 = first; u0 < last; u0 += kRoundStages) {
    const int count = min(kRoundStages, last - u0);
    const GateUpOutput out = find_gate_up(op, choice, u0, count);
    for (int n = 0; n < count; ++n) {
      const uint8_t* stage = ring.wait_full();
      const float sum = row.multiply(stage + warp / 4 * op.gate.tile_bytes);  // four warps gate, four up
      ring.release(lane);
      ring.advance();
      if (threadIdx.x == 0) feeder.refill(u0 - first + n);
      __syncwarp();  // nobody of warp 0 spins for a piece that thread 0 has yet to ask for
      partial[(n * kSegments + 4 * (warp % 4) + lane % 4) * kValues + warp / 4 * kTileRows + lane / 4] = sum;
    }
    ptx::named_barrier<kComputeBarrier, kComputeThreads>();  // all partial sums of the round are there
    if (out.slot >= 0) {
      const float* mine = partial + threadIdx.x / kTileRows * kSegments * kValues + threadIdx.x % kTileRows;
      const float gate = add_segments(mine, kValues) + out.gate_bias;
      const float up = add_segments(mine + kTileRows, kValues) + out.up_bias;
      store_act(op, out.slot, out.row, activate(op.activation, gate, up));
    }
    ptx::named_barrier<kComputeBarrier, kComputeThreads>();  // and read, before the next round's
  }
}

// ---------------------------------------------------------------- down

// The k rows of activations, the next one's loads under way while one is quantized.
__device__ inline void quantize_slots(const float* act, int k, int cols, const QuantizedRows& to) {
  const int quads = cols / 4, pairs = packed_pairs(cols), thread = threadIdx.x;
  const auto* rows = reinterpret_cast<const float4*>(act);
  HeldQuads next;
  next.load<true>(rows, quads, thread);
  for (int s = 0; s < k; ++s) {
    const HeldQuads row = next;
    if (s + 1 < k) next.load<true>(rows + int64_t{s + 1} * quads, quads, thread);
#pragma unroll
    for (int j = 0; j < kHeldQuads; ++j) {
      const int i = j * kRowThreads + thread;
      if (j * kRowThreads >= pairs * (kPairColumns / 4)) continue;  // the whole CTA alike: lanes exchange
      const QuantizedQuad q = quantize_quad(row.v[j]);
      if (i < pairs * (kPairColumns / 4)) store_quad(to, int64_t{s} * pairs, i, q);
    }
  }
}
static_assert(kHeldQuads * kRowThreads >=
              4 * kSegments * (kPairColumns / 4));  // four pairs per segment at most

// A piece of work is one slot's tile of 8 rows. A round is some tiles: first all of slot 0, then of slot 1,
// so that a warp holds one slot's activations at a time.
template <int kPairs>
__global__ void __launch_bounds__(kComputeThreads, 2)
    stream_down_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared, kComputeWarps / 2);
  float* partial = p.shape.partial(shared);  // [slot][tile][segment][8]
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int total = op.down.tiles_per_expert, pairs = op.down.pairs, k = op.k;
  const int first = static_cast<int>(int64_t{blockIdx.x} * total / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * total / gridDim.x);
  // Rounds of kDownTiles tiles, in each of them slot after slot.
  Feeder feeder(ring, (last - first) * k, [&](const Ring& stage, int i) {
    const int u0 = first + i / (kDownTiles * k) * kDownTiles, in_round = i % (kDownTiles * k);
    const int count = min(kDownTiles, last - u0);
    stage.claim(op.down.tile_bytes);
    stage.copy(0, expert_tile(op.down, choice.expert[in_round / count], u0 + in_round % count),
               op.down.tile_bytes);
  });
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  if (warp == 0) {
    choose(op, lane, choice);  // the scores are older than the kernel before: see stream_gate_up_kernel
    if (lane == 0) feeder.fill();
  }
  __syncthreads();  // the choice and the barriers are there
  ptx::wait_for_previous();
  const QuantizedRows x = quantized_rows(p.shape.rows(shared), k, pairs);
  quantize_slots(op.act + int64_t{blockIdx.y} * k * op.down.cols, k, static_cast<int>(op.down.cols), x);
  ptx::named_barrier<kComputeBarrier, kComputeThreads>();  // the rows are quantized

  constexpr int kStride = kDownTiles * kSegments * kTileRows;
  for (int u0 = first; u0 < last; u0 += kDownTiles) {
    const int count = min(kDownTiles, last - u0);
    const DownOutput out = find_down(op, choice, u0 + min(warp, count - 1), lane);
    for (int s = 0; s < k; ++s) {
      SingleRow<kPairs> row;
      row.template load<false>(x, s, pairs, warp % 4, lane);
      for (int n = 0; n < count; ++n) {
        const int i = (u0 - first) * k + s * count + n;  // four warps take the even pieces, four the odd ones
        if (i % 2 == warp / 4) {
          const float sum = row.multiply(ring.wait_full());
          ring.release(lane);
          partial[s * kStride + (n * kSegments + 4 * (warp % 4) + lane % 4) * kTileRows + lane / 4] = sum;
        }
        ring.advance();
        if (threadIdx.x == 0) feeder.refill(i);
        __syncwarp();  // nobody of warp 0 spins for a piece that thread 0 has yet to ask for
      }
    }
    ptx::named_barrier<kComputeBarrier, kComputeThreads>();  // all partial sums of the round are there
    if (warp < count) {
      finish_down(op, choice, out, partial + warp * kSegments * kTileRows, kStride, u0 + warp, lane);
    }
    ptx::named_barrier<kComputeBarrier, kComputeThreads>();  // and read, before the next round's
  }
}
static_assert(kDownTiles <= kComputeWarps);  // a warp per tile adds it up

// ---------------------------------------------------------------- launching

StreamShape gate_up_shape(const StreamExperts& op) {
  constexpr uint32_t kPartial = kRoundStages * kSegments * 2 * kTileRows * sizeof(float);
  const int64_t pieces = int64_t{op.k} * op.gate.tiles_per_expert, ctas = multiprocessors();
  return stream_shape(2 * op.gate.tile_bytes, pieces / ctas + 2, 0, kPartial);
}
StreamShape down_shape(const StreamExperts& op) {
  const uint32_t partial_bytes =
      static_cast<uint32_t>(op.k) * kDownTiles * kSegments * kTileRows * sizeof(float);
  const auto rows_bytes = static_cast<uint32_t>(op.k * op.down.pairs) * kRowPairBytes;
  const int64_t ctas = multiprocessors(), pieces = op.k * ((op.down.tiles_per_expert + ctas - 1) / ctas);
  StreamShape shape = stream_shape(op.down.tile_bytes, pieces + 1, rows_bytes, partial_bytes);
  // Even: a stage always has the same four readers, who so see every phase of its barrier.
  if (shape.stages > 1) shape.stages = shape.stages / 2 * 2;
  return shape;
}

template <int kPairs>
void launch_gate_up(const ExpertParams& p, cudaStream_t stream) {
  const auto kernel = stream_gate_up_kernel<kPairs>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("stream_gate_up_kernel", kernel,
                   expert_grid(int64_t{p.op.k} * p.op.gate.tiles_per_expert, p.op.tokens), kComputeThreads,
                   p.shape.total(), stream, p);
}

void launch_gate_up_for_pairs(const ExpertParams& p, cudaStream_t stream) {
  const int per = pairs_per_segment(p.op.gate.pairs);
  if (per == 1) return launch_gate_up<1>(p, stream);
  if (per == 2) return launch_gate_up<2>(p, stream);
  if (per == 3) return launch_gate_up<3>(p, stream);
  launch_gate_up<4>(p, stream);
}

template <int kPairs>
void launch_down(const ExpertParams& p, cudaStream_t stream) {
  const auto kernel = stream_down_kernel<kPairs>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("stream_down_kernel", kernel, expert_grid(p.op.down.tiles_per_expert, p.op.tokens),
                   kComputeThreads, p.shape.total(), stream, p);
}

void launch_down_for_pairs(const ExpertParams& p, cudaStream_t stream) {
  const int per = pairs_per_segment(p.op.down.pairs);
  if (per == 1) return launch_down<1>(p, stream);
  if (per == 2) return launch_down<2>(p, stream);
  if (per == 3) return launch_down<3>(p, stream);
  launch_down<4>(p, stream);
}

}  // namespace

bool fits_stream_experts(const StreamExperts& op) {
  if (op.gate.format == PackedFormat::kNone || op.gate.format != op.up.format || op.k > kMaxChosen)
    return false;
  if (op.down.format == PackedFormat::kNone) return false;
  if (pairs_per_segment(op.gate.pairs) > 4 || pairs_per_segment(op.down.pairs) > 4) return false;
  const bool gate_up_fits = op.gate.format == PackedFormat::kMx4 ? mx4_gate_up_shape(op).stages >= 2
                                                                 : gate_up_shape(op).stages >= 2;
  return gate_up_fits &&
         (op.down.format == PackedFormat::kMx4 ? mx4_down_shape(op).stages >= 2 : down_shape(op).stages >= 4);
}

void launch_stream_experts(const StreamExperts& op, cudaStream_t stream) {
  if (op.tokens == 0) return;
  if (op.gate.format == PackedFormat::kMx4) {
    launch_mx4_gate_up(op, stream);
  } else {
    launch_gate_up_for_pairs({op, gate_up_shape(op)}, stream);
  }
  if (op.down.format == PackedFormat::kMx4) {
    launch_mx4_down(op, stream);
  } else {
    launch_down_for_pairs({op, down_shape(op)}, stream);
  }
}

}  // namespace millrace::cuda
