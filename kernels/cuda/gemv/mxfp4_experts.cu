// The expert layer of one to four tokens with MXFP4 weights, in two kernels: gate and up with the activation,
// then down with the weighted sum. Each token streams its own experts (blockIdx.y).
//
// A CTA is sixteen warps, one per segment of the columns (mx4.cuh). A piece of work is two tiles of 8 rows
// that make the 16 rows of a tensor core product: gate and up of the same rows, or the same rows of two
// slots' down. Activations lie in shared memory as plain bf16 rows; each of the product's eight columns reads
// one, the same again and again, since there is one token only.
//
// Roofline: gpt-oss-20b, one token: 35.3 MB and 17.6 MB of tiles per layer, 8.2 and 4.1 us at B = 4.3 TB/s.
// Some 38 instructions of a warp per 16 x 32 weights, 7 us of issue slots for both kernels. Gate and up
// cannot begin before the router has spoken; down can: its first stages are under way while gate and up still
// compute.
#include "kernels/cuda/gemv/mxfp4_experts.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = kSegments;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kFeeder =
    kThreads - kWarpLanes;        // the thread that asks for pieces: its segment is the shortest
constexpr int kGateUpRound = 16;  // pieces whose partial sums are kept before they are added up

// Rows of bf16 activations on their way to shared memory, one copy; the columns of a missing last block are
// zeros. Everybody calls zero_padding before the barrier that shows everybody `full`.
struct SharedRows {
  uint8_t* rows;
  int cols, pairs;
  __device__ uint32_t stride() const { return static_cast<uint32_t>(pairs) * kPairColumns * 2; }
  __device__ void zero_padding(int count) const {
    const int padding = pairs * kPairColumns - cols;
    for (int i = threadIdx.x; i < count * padding; i += kThreads) {
      reinterpret_cast<uint16_t*>(rows + i / padding * stride())[cols + i % padding] = 0;
    }
  }
  __device__ void ask(const uint16_t* from, int count, uint64_t* full) const {  // one thread
    const auto bytes = static_cast<uint32_t>(cols) * 2u;
    ptx::barrier_arrive_expect(full, static_cast<uint32_t>(count) * bytes);
    for (int i = 0; i < count; ++i)
      ptx::bulk_copy_kept(rows + i * stride(), from + int64_t{i} * cols, bytes, full);
  }
};

// ---------------------------------------------------------------- gate and up

// A piece is a slot's tile of 8 gate rows with the same 8 up rows. partial [piece][segment][gate, up][8].
template <int kPairs>
__global__ void __launch_bounds__(kThreads, 2) mx4_gate_up_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  __shared__ uint64_t rows_full;
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared, kSegments);
  float* partial = p.shape.partial(shared);
  const SharedRows x{p.shape.rows(shared), static_cast<int>(op.gate.cols), op.gate.pairs};
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
  x.zero_padding(1);
  ptx::wait_for_previous();
  ptx::let_dependents_start();  // after the wait: the next kernel reads the scores before its own
  if (warp == kWarps - 1) {
    if (lane == 0) x.ask(op.rounded + int64_t{blockIdx.y} * op.gate.cols, 1, &rows_full);
    choose(op, lane, choice);
    __syncwarp();  // the choice is there
    feeder.fill_by_warp(lane);
  }
  __syncthreads();  // the choice, the barriers and the padding are there
  const Segment segment(op.gate.pairs, warp);
  ptx::barrier_wait(&rows_full, 0);
  for (int u0 = first; u0 < last; u0 += kGateUpRound) {
    const int count = min(kGateUpRound, last - u0);
    const HalfOutput out = find_half(op, choice, u0, count);
    for (int n = 0; n < count; ++n, ring.advance()) {
      const uint8_t* stage = ring.wait_full();
      float sum[4] = {};
      multiply_segment<kPairs>(stage, stage + op.gate.tile_bytes, x.rows, segment.first, segment.count, lane,
                               sum);
      ring.release(lane);
      if (threadIdx.x == kFeeder) feeder.refill(u0 - first + n);
      __syncwarp();  // nobody of the feeder's warp spins for a piece that has yet to be asked for
      if (lane % 4 == 0) {
        float* to = partial + (n * kSegments + warp) * kPieceRows + lane / 4;
        to[0] = sum[0] * kMx4Unscale;
        to[kTileRows] = sum[2] * kMx4Unscale;
      }
    }
    __syncthreads();  // all partial sums of the round are there
    const int value = threadIdx.x % kPieceRows;
    float half = 0.0f;
    if (out.slot >= 0) {
      half = add_segments(partial + threadIdx.x / kPieceRows * kSegments * kPieceRows + value, kPieceRows) +
             out.bias;
    }
    const float up = __shfl_down_sync(kAllLanes, half, kTileRows);
    if (out.slot >= 0 && value < kTileRows)
      store_act(op, out.slot, out.row, activate(op.activation, half, up));
    if (u0 + kGateUpRound < last) __syncthreads();  // and read, before the next round's
  }
}
static_assert(kGateUpRound * kPieceRows <= kThreads);

// ---------------------------------------------------------------- down

// A piece is one tile of 8 rows of two slots: rows 0-7 of the product are the first's, 8-15 the second's, and
// so are the even and the odd columns. A round is some tiles: first all of slots 0 and 1, then of 2 and 3.
template <int kPairs>
__global__ void __launch_bounds__(kThreads, 2) mx4_down_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  __shared__ uint64_t rows_full;
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared, kSegments);
  float* partial = p.shape.partial(shared);  // [slot][tile][segment][8]
  const SharedRows x{p.shape.rows(shared), static_cast<int>(op.down.cols), op.down.pairs};
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
    choose(op, lane, choice);  // the scores are older than the kernel before: see mx4_gate_up_kernel
    __syncwarp();              // the choice is there
    feeder.fill_by_warp(lane);
  }
  x.zero_padding(k);
  __syncthreads();  // the choice, the barriers and the padding are there
  ptx::wait_for_previous();
  if (threadIdx.x == kFeeder) {
    x.ask(reinterpret_cast<const uint16_t*>(op.act) + int64_t{blockIdx.y} * k * op.down.cols, k, &rows_full);
  }
  const Segment segment(op.down.pairs, warp);
  constexpr int kStride = kDownTiles * kSegments * kTileRows;
  bool rows_there = false;
  for (int u0 = first; u0 < last; u0 += kDownTiles) {
    const int count = min(kDownTiles, last - u0);
    const DownOutput out = find_down(op, choice, u0 + min(warp, count - 1), lane);
    if (!rows_there) ptx::barrier_wait(&rows_full, 0);
    rows_there = true;
    for (int i = 0; i < twos * count; ++i, ring.advance()) {
      const int slot = i / count * 2, n = i % count;
      const bool both = slot + 1 < k;
      const uint8_t* stage = ring.wait_full();
      const uint8_t* row = x.rows + (slot + (both ? lane / 4 % 2 : 0)) * x.stride();
      float sum[4] = {};
      multiply_segment<kPairs>(stage, stage + (both ? op.down.tile_bytes : 0), row, segment.first,
                               segment.count, lane, sum);
      ring.release(lane);
      if (threadIdx.x == kFeeder) feeder.refill((u0 - first) * twos + i);
      __syncwarp();  // nobody of the feeder's warp spins for a piece that has yet to be asked for
      if (lane % 4 == 0) {
        float* to = partial + slot * kStride + (n * kSegments + warp) * kTileRows + lane / 4;
        to[0] = sum[0] * kMx4Unscale;
        if (both) to[kStride] = sum[3] * kMx4Unscale;
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

template <int kPairs>
void launch_gate_up(const ExpertParams& p, const Launch& at) {
  const auto kernel = mx4_gate_up_kernel<kPairs>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("mx4_gate_up_kernel", kernel,
                   expert_grid(int64_t{p.op.k} * p.op.gate.tiles_per_expert, p.op.tokens, at.device),
                   kThreads, p.shape.total(), at, p);
}
template <int kPairs>
void launch_down(const ExpertParams& p, const Launch& at) {
  const auto kernel = mx4_down_kernel<kPairs>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("mx4_down_kernel", kernel, expert_grid(p.op.down.tiles_per_expert, p.op.tokens, at.device),
                   kThreads, p.shape.total(), at, p);
}

uint32_t row_bytes(const PackedMatrix& w) { return static_cast<uint32_t>(w.pairs) * kPairColumns * 2; }

}  // namespace

StreamShape mx4_gate_up_shape(const StreamExperts& op, const Device& device) {
  constexpr uint32_t kPartial = kGateUpRound * kSegments * kPieceRows * sizeof(float);
  const int64_t pieces = int64_t{op.k} * op.gate.tiles_per_expert, ctas = device.sm_count();
  return stream_shape(2 * op.gate.tile_bytes, pieces / ctas + 2, row_bytes(op.gate), kPartial, device,
                      kWholeBytes);
}
StreamShape mx4_down_shape(const StreamExperts& op, const Device& device) {
  const auto slots = static_cast<uint32_t>(op.k);
  const int64_t ctas = device.sm_count(), tiles = (op.down.tiles_per_expert + ctas - 1) / ctas;
  return stream_shape(2 * op.down.tile_bytes, tiles * ((op.k + 1) / 2) + 1, slots * row_bytes(op.down),
                      slots * kDownTiles * kSegments * kTileRows * sizeof(float), device);
}

void launch_mx4_gate_up(const StreamExperts& op, const Launch& at) {
  const ExpertParams p{op, mx4_gate_up_shape(op, at.device)};
  const int per = pairs_per_segment(op.gate.pairs);
  if (per == 1) return launch_gate_up<1>(p, at);
  if (per == 2) return launch_gate_up<2>(p, at);
  if (per == 3) return launch_gate_up<3>(p, at);
  launch_gate_up<4>(p, at);
}
void launch_mx4_down(const StreamExperts& op, const Launch& at) {
  const ExpertParams p{op, mx4_down_shape(op, at.device)};
  const int per = pairs_per_segment(op.down.pairs);
  if (per == 1) return launch_down<1>(p, at);
  if (per == 2) return launch_down<2>(p, at);
  if (per == 3) return launch_down<3>(p, at);
  launch_down<4>(p, at);
}

}  // namespace millrace::cuda
