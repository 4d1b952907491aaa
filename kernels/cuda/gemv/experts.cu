// The expert layer of one to four tokens with 8-bit or bf16 weights, in two kernels: gate and up with the
// activation, then down with the weighted sum. Each token streams its own experts (blockIdx.y). MXFP4 experts
// have kernels of their own: stream_mx4.cu.
//
// A CTA is sixteen warps, one per segment of the columns. A piece of work is two tiles of 8 rows that make
// the 16 rows of a tensor core product: gate and up of the same rows, or the same rows of two slots' down.
//
// Roofline: the chosen tiles' bytes at B = 4.3 TB/s. Gate and up cannot begin before the router has spoken;
// down can: its first stages are under way while gate and up still compute.
#include "kernels/cuda/gemv/experts.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = kSegments;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kFeeder =
    kThreads - kWarpLanes;  // the thread that asks for pieces: its segment is the shortest
constexpr int kPieceRows = 2 * kTileRows;
constexpr int kGateUpRound = 8;  // pieces whose partial sums are kept before they are added up

// Rows of bf16 activations in shared memory; the columns of a missing last block are zeros.
__device__ inline uint32_t stride_of(const PackedMatrix& w) {
  return static_cast<uint32_t>(w.pairs) * kPairColumns * 2;
}
__device__ inline void zero_padding(uint8_t* rows, const PackedMatrix& w, int count) {
  const int cols = static_cast<int>(w.cols), padding = w.pairs * kPairColumns - cols;
  for (int i = threadIdx.x; i < count * padding; i += kThreads)
    reinterpret_cast<uint16_t*>(rows + i / padding * stride_of(w))[cols + i % padding] = 0;
}
// One thread.
__device__ inline void ask_for_rows(uint8_t* rows, const PackedMatrix& w, const uint16_t* from, int count,
                                    uint64_t* full) {
  const auto bytes = static_cast<uint32_t>(w.cols) * 2u;
  ptx::barrier_arrive_expect(full, static_cast<uint32_t>(count) * bytes);
  for (int i = 0; i < count; ++i)
    ptx::bulk_copy_kept(rows + i * stride_of(w), from + int64_t{i} * w.cols, bytes, full);
}

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

// A piece is a slot's tile of 8 gate rows with the same 8 up rows. partial [piece][segment][gate, up][8].
template <PackedFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1) stream_gate_up_kernel(const __grid_constant__ ExpertParams p) {
  using Format = TileFormat<kFormat>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  __shared__ uint64_t rows_full;
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared, kSegments);
  float* partial = p.shape.partial(shared);
  uint8_t* rows = p.shape.rows(shared);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int total = op.k * op.gate.tiles_per_expert;
  const int first = static_cast<int>(int64_t{blockIdx.x} * total / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * total / gridDim.x);
  Feeder feeder(ring, last - first, [&](const Ring& stage, int i) {
    const int u = first + i, tile = u % op.gate.tiles_per_expert;
    const int expert = choice.expert[u / op.gate.tiles_per_expert];
    stage.claim(2 * op.gate.tile_bytes);
    stage.copy(0, expert_tile(op.gate, expert, tile), op.gate.tile_bytes);
    stage.copy(op.gate.tile_bytes, expert_tile(op.up, expert, tile), op.gate.tile_bytes);
  });
  if (threadIdx.x == kFeeder) {
    ptx::barrier_init(&rows_full, 1);
    ring.init();
  }
  zero_padding(rows, op.gate, 1);
  ptx::wait_for_previous();
  ptx::let_dependents_start();  // after the wait: the next kernel reads the scores before its own
  if (warp == kWarps - 1) {
    if (lane == 0)
      ask_for_rows(rows, op.gate, op.rounded + int64_t{blockIdx.y} * op.gate.cols, 1, &rows_full);
    choose(op, lane, choice);
    __syncwarp();  // the choice is there
    feeder.fill_by_warp(lane);
  }
  __syncthreads();  // the choice, the barriers and the padding are there
  const WarpSegment segment(op.gate.pairs, warp);
  const uint8_t* x = rows + segment.first * (kPairColumns * 2);
  ptx::barrier_wait(&rows_full, 0);
  for (int u0 = first; u0 < last; u0 += kGateUpRound) {
    const int count = min(kGateUpRound, last - u0);
    const GateUpOutput out = find_gate_up(op, choice, u0, count);
    for (int n = 0; n < count; ++n, ring.advance()) {
      const uint8_t* tiles = ring.wait_full() + segment.first * Format::kPairBytes;
      float sum[4] = {};
      multiply_segment<kFormat, 0, true>(tiles, tiles + op.gate.tile_bytes, x, segment.count, lane, sum);
      ring.release(lane);
      if (threadIdx.x == kFeeder) feeder.refill(u0 - first + n);
      __syncwarp();  // nobody of the feeder's warp spins for a piece that has yet to be asked for
      if (lane % 4 == 0) {
        float* to = partial + (n * kSegments + warp) * kPieceRows + lane / 4;
        to[0] = sum[0] * Format::kUnscale;
        to[kTileRows] = sum[2] * Format::kUnscale;
      }
    }
    __syncthreads();  // all partial sums of the round are there
    if (out.slot >= 0) {
      const float* mine =
          partial + threadIdx.x / kTileRows * kSegments * kPieceRows + threadIdx.x % kTileRows;
      const float gate = add_segments(mine, kPieceRows) + out.gate_bias;
      const float up = add_segments(mine + kTileRows, kPieceRows) + out.up_bias;
      store_act(op, out.slot, out.row, activate(op.activation, gate, up));
    }
    if (u0 + kGateUpRound < last) __syncthreads();  // and read, before the next round's
  }
}
static_assert(kGateUpRound * kTileRows <= kThreads);

// ---------------------------------------------------------------- down

// A piece is one tile of 8 rows of two slots: rows 0-7 of the product are the first's, 8-15 the second's, and
// so are the even and the odd columns. A round is some tiles: first all of slots 0 and 1, then of 2 and 3.
template <PackedFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1) stream_down_kernel(const __grid_constant__ ExpertParams p) {
  using Format = TileFormat<kFormat>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  __shared__ uint64_t rows_full;
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared, kSegments);
  float* partial = p.shape.partial(shared);  // [slot][tile][segment][8]
  uint8_t* rows = p.shape.rows(shared);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int total = op.down.tiles_per_expert, k = op.k, twos = (k + 1) / 2;
  const int first = static_cast<int>(int64_t{blockIdx.x} * total / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * total / gridDim.x);
  Feeder feeder(ring, (last - first) * twos, [&](const Ring& stage, int i) {
    const int u0 = first + i / (kDownTiles * twos) * kDownTiles, in_round = i % (kDownTiles * twos);
    const int count = min(kDownTiles, last - u0), slot = in_round / count * 2, tile = u0 + in_round % count;
    const bool both = slot + 1 < k;
    stage.claim((both ? 2u : 1u) * op.down.tile_bytes);
    stage.copy(0, expert_tile(op.down, choice.expert[slot], tile), op.down.tile_bytes);
    if (both)
      stage.copy(op.down.tile_bytes, expert_tile(op.down, choice.expert[slot + 1], tile), op.down.tile_bytes);
  });
  if (threadIdx.x == kFeeder) {
    ptx::barrier_init(&rows_full, 1);
    ring.init();
  }
  ptx::let_dependents_start();
  if (warp == kWarps - 1) {
    choose(op, lane, choice);  // the scores are older than the kernel before: see stream_gate_up_kernel
    __syncwarp();              // the choice is there
    feeder.fill_by_warp(lane);
  }
  zero_padding(rows, op.down, k);
  __syncthreads();  // the choice, the barriers and the padding are there
  ptx::wait_for_previous();
  if (threadIdx.x == kFeeder) {
    ask_for_rows(rows, op.down,
                 reinterpret_cast<const uint16_t*>(op.act) + int64_t{blockIdx.y} * k * op.down.cols, k,
                 &rows_full);
  }
  const WarpSegment segment(op.down.pairs, warp);
  const int column = activation_row<kFormat>(lane);
  constexpr int kStride = kDownTiles * kSegments * kTileRows;
  ptx::barrier_wait(&rows_full, 0);
  for (int u0 = first; u0 < last; u0 += kDownTiles) {
    const int count = min(kDownTiles, last - u0);
    const DownOutput out = find_down(op, choice, u0 + min(warp, count - 1), lane);
    for (int i = 0; i < twos * count; ++i, ring.advance()) {
      const int slot = i / count * 2, n = i % count;
      const bool both = slot + 1 < k;
      const uint8_t* tiles = ring.wait_full() + segment.first * Format::kPairBytes;
      const uint8_t* x =
          rows + (slot + (both ? column % 2 : 0)) * stride_of(op.down) + segment.first * (kPairColumns * 2);
      float sum[4] = {};
      multiply_segment<kFormat, 0, true>(tiles, tiles + (both ? op.down.tile_bytes : 0), x, segment.count,
                                         lane, sum);
      ring.release(lane);
      if (threadIdx.x == kFeeder) feeder.refill((u0 - first) * twos + i);
      __syncwarp();  // nobody of the feeder's warp spins for a piece that has yet to be asked for
      if (lane % 4 == 0) {
        float* to = partial + slot * kStride + (n * kSegments + warp) * kTileRows + lane / 4;
        to[0] = sum[0] * Format::kUnscale;
        if (both) to[kStride] = sum[3] * Format::kUnscale;
      }
    }
    __syncthreads();  // all partial sums of the round are there
    if (warp < count) {
      finish_down(op, choice, out, partial + warp * kSegments * kTileRows, kStride, u0 + warp, lane);
    }
    if (u0 + kDownTiles < last) __syncthreads();  // and read, before the next round's
  }
}
static_assert(kDownTiles <= kWarps);  // a warp per tile adds it up

// ---------------------------------------------------------------- launching

uint32_t row_bytes(const PackedMatrix& w) { return static_cast<uint32_t>(w.pairs) * kPairColumns * 2; }

StreamShape gate_up_shape(const StreamExperts& op, const Device& device) {
  if (op.gate.format == PackedFormat::kMx4) return mx4_gate_up_shape(op, device);
  constexpr uint32_t kPartial = kGateUpRound * kSegments * kPieceRows * sizeof(float);
  const int64_t pieces = int64_t{op.k} * op.gate.tiles_per_expert, ctas = device.sm_count();
  return stream_shape(2 * op.gate.tile_bytes, pieces / ctas + 2, row_bytes(op.gate), kPartial, device);
}
StreamShape down_shape(const StreamExperts& op, const Device& device) {
  if (op.down.format == PackedFormat::kMx4) return mx4_down_shape(op, device);
  const auto slots = static_cast<uint32_t>(op.k);
  const int64_t ctas = device.sm_count(), tiles = (op.down.tiles_per_expert + ctas - 1) / ctas;
  return stream_shape(2 * op.down.tile_bytes, tiles * ((op.k + 1) / 2) + 1, slots * row_bytes(op.down),
                      slots * kDownTiles * kSegments * kTileRows * sizeof(float), device);
}

template <PackedFormat kFormat>
void launch_gate_up(const ExpertParams& p, const Launch& at) {
  const auto kernel = stream_gate_up_kernel<kFormat>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("stream_gate_up_kernel", kernel,
                   expert_grid(int64_t{p.op.k} * p.op.gate.tiles_per_expert, p.op.tokens, at.device),
                   kThreads, p.shape.total(), at, p);
}
template <PackedFormat kFormat>
void launch_down(const ExpertParams& p, const Launch& at) {
  const auto kernel = stream_down_kernel<kFormat>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("stream_down_kernel", kernel,
                   expert_grid(p.op.down.tiles_per_expert, p.op.tokens, at.device), kThreads, p.shape.total(),
                   at, p);
}

}  // namespace

bool fits_stream_experts(const StreamExperts& op, const Device& device) {
  if (op.gate.format == PackedFormat::kNone || op.gate.format != op.up.format || op.k > kMaxChosen)
    return false;
  if (op.down.format == PackedFormat::kNone) return false;
  if (pairs_per_segment(op.gate.pairs) > 4 || pairs_per_segment(op.down.pairs) > 4) return false;
  return gate_up_shape(op, device).stages >= 2 && down_shape(op, device).stages >= 2;
}

void launch_stream_experts(const StreamExperts& op, const Launch& at) {
  if (op.tokens == 0) return;
  if (op.gate.format == PackedFormat::kMx4) {
    launch_mx4_gate_up(op, at);
  } else if (op.gate.format == PackedFormat::kBf16) {
    launch_gate_up<PackedFormat::kBf16>({op, gate_up_shape(op, at.device)}, at);
  } else {
    launch_gate_up<PackedFormat::kQ8>({op, gate_up_shape(op, at.device)}, at);
  }
  if (op.down.format == PackedFormat::kMx4) {
    launch_mx4_down(op, at);
  } else if (op.down.format == PackedFormat::kBf16) {
    launch_down<PackedFormat::kBf16>({op, down_shape(op, at.device)}, at);
  } else {
    launch_down<PackedFormat::kQ8>({op, down_shape(op, at.device)}, at);
  }
}

}  // namespace millrace::cuda
