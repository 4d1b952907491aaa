// The router and the experts of one token with MXFP4 weights in one kernel, a CTA to each SM, all resident.
// What two kernels would wait for through their boundary goes through words in global memory, and the ring of
// weights does not stop: while gate and up are added up and everybody waits for everybody, down's tiles
// arrive.
//
// A CTA is fifteen warps, one per segment of the columns (the sixteenth segment is empty), and one that
// brings tiles. In turn: the norm of the row (every CTA for itself) and one expert's score in each of the
// first CTAs; the choice, in every CTA, when all scores are there; gate and up of some tiles; all CTAs wait
// until the activations are there; down of some tiles.
//
// Roofline: gpt-oss-20b: 52.9 MB of tiles, 12.3 us at B = 4.3 TB/s, after some 4 us in which nothing can be
// asked for: the row, the scores, the choice and the first bytes. Some 38 instructions of a warp per 16 x 32
// weights, 7 us of issue slots.
#include "kernels/cuda/gemv/mxfp4_experts.cuh"
#include "kernels/cuda/norm/rmsnorm_row.cuh"
#include "kernels/cuda/ptx/grid_sync.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = kSegments, kMultiplyWarps = kWarps - 1;
constexpr int kThreads = kWarps * kWarpLanes, kMultiplyThreads = kMultiplyWarps * kWarpLanes;
constexpr int kRound = 12;      // pieces of gate and up whose partial sums are kept before they are added up
constexpr int kScoreWarps = 4;  // of an expert's score: the sum's order, as in stream_route.cu
constexpr int kNormBarrier = 1, kMultiplyBarrier = 2;
constexpr int kMostExperts = kHeldScores * kWarpLanes;

struct MoeParams {
  StreamRoute route;
  StreamExperts op;
  StreamShape shape;
  MoeSync* sync;
};

// ---------------------------------------------------------------- the router

// The first kRowThreads threads: the row's norm, as bf16 (and zeros in a missing last block) to x, and,
// unless that is null, as float32 to `normed`.
__device__ inline void norm_to_shared(const StreamRoute& op, const HeldQuads& weight, int pairs,
                                      float* partial, uint8_t* x, float4* normed) {
  const int quads = op.cols / 4, thread = threadIdx.x;
  const auto* from = reinterpret_cast<const float4*>(op.x);
  HeldQuads held;
  held.load<true>(from, quads, thread);
  const float scale = row_inverse_rms<kNormBarrier>(from, held, quads, op.eps, thread, partial);
#pragma unroll
  for (int j = 0; j < kHeldQuads; ++j) {
    const int i = j * kRowThreads + thread;
    const float4 v = norm_quad(held.v[j], scale, weight.v[j]);  // zeros past the last
    if (i < pairs * (kPairColumns / 4)) {
      reinterpret_cast<uint2*>(x)[i] = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    }
    if (normed != nullptr && i < quads) normed[i] = v;
  }
}

// One expert's score, by kScoreWarps warps and in the order of stream_route.cu's sum.
__device__ inline void score(const MoeParams& p, const float4* router, const float4* normed, float bias,
                             float* parts, uint32_t tag) {
  const int quads = p.route.cols / 4, thread = threadIdx.x;
  if (thread < kScoreWarps * kWarpLanes) {
    float sum = 0.0f;
    for (int i = thread; i < quads; i += kScoreWarps * kWarpLanes) {
      const float4 a = router[i], b = normed[i];
      sum = fmaf(a.x, b.x, sum);
      sum = fmaf(a.y, b.y, sum);
      sum = fmaf(a.z, b.z, sum);
      sum = fmaf(a.w, b.w, sum);
    }
    sum = warp_sum(sum);
    if (thread % kWarpLanes == 0) parts[thread / kWarpLanes] = sum;
  }
  ptx::named_barrier<kNormBarrier, kRowThreads>();  // all parts are there
  if (thread != 0) return;
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kScoreWarps; ++i) all += parts[i];
  ptx::store_tagged(p.sync->scores + blockIdx.x, __float_as_uint(all + bias), tag);
}

// The sixteenth warp: the choice, when all scores are there.
__device__ inline void choose_when_there(const MoeParams& p, uint32_t tag, int lane, Choice& choice) {
  LaneScores scores;
  scores.experts = p.op.experts;
#pragma unroll
  for (int i = 0; i < kHeldScores; ++i) {
    const int e = i * kWarpLanes + lane;
    scores.held[i] =
        e < p.op.experts ? __uint_as_float(ptx::wait_tagged(p.sync->scores + e, tag)) : -INFINITY;
  }
  choose_experts(scores, p.op.k, p.op.softmax_over_all, lane, choice.expert, choice.weight);
}

// ---------------------------------------------------------------- pieces

// A CTA's pieces of two tiles: gate and up of 8 rows, then down of 8 rows for one slot and the next. Known
// before the choice is: what follows it should be short.
struct Pieces {
  int count, slot, tile;       // of gate and up, and the first one's
  int first_tile, down_tiles;  // of down

  // f(slot, tile) for each piece of gate and up, in order.
  template <class F>
  __device__ void each_gate_up(const StreamExperts& op, F&& f) const {
    for (int i = 0, s = slot, t = tile; i < count; ++i) {
      f(s, t);
      if (++t == op.gate.tiles_per_expert) t = 0, ++s;
    }
  }
  // The same of down: rounds of kDownTiles tiles, in these two slots after two; the first of the two.
  template <class F>
  __device__ void each_down(const StreamExperts& op, F&& f) const {
    for (int u0 = 0; u0 < down_tiles; u0 += kDownTiles) {
      const int here = min(kDownTiles, down_tiles - u0);
      for (int s = 0; s < op.k; s += 2) {
        for (int n = 0; n < here; ++n) f(s, first_tile + u0 + n);
      }
    }
  }
};

__device__ inline Pieces find_pieces(const StreamExperts& op) {
  const auto cut = [](int total, unsigned at) {
    return static_cast<int>(at * static_cast<unsigned>(total) / gridDim.x);
  };
  const int per = op.gate.tiles_per_expert, total = op.k * per, down = op.down.tiles_per_expert;
  const int first = cut(total, blockIdx.x), first_tile = cut(down, blockIdx.x);
  return {cut(total, blockIdx.x + 1) - first, first / per, first % per, first_tile,
          cut(down, blockIdx.x + 1) - first_tile};
}

// One thread: brings all pieces.
__device__ inline void bring(const StreamExperts& op, const Choice& choice, const Pieces& pieces, Ring ring) {
  const auto copy = [&](const uint8_t* low, const uint8_t* high, uint32_t bytes) {
    ring.claim(2 * bytes);
    ring.copy(0, low, bytes);
    ring.copy(bytes, high, bytes);
    ring.advance();
  };
  pieces.each_gate_up(op, [&](int slot, int tile) {
    const int expert = choice.expert[slot];
    copy(expert_tile(op.gate, expert, tile), expert_tile(op.up, expert, tile), op.gate.tile_bytes);
  });
  const auto down_tile = [&](int slot, int tile) { return expert_tile(op.down, choice.expert[slot], tile); };
  int n = 0;
  pieces.each_down(op, [&](int slot, int tile) {
    if (n++ == ring.stages) {  // the ring is full, and nobody reads it before everybody has arrived
      int i = 0;
      pieces.each_down(op, [&](int later, int row) {
        if (i++ < ring.stages) return;
        ptx::prefetch_l2(down_tile(later, row), op.down.tile_bytes);
        ptx::prefetch_l2(down_tile(later + 1, row), op.down.tile_bytes);
      });
    }
    copy(down_tile(slot, tile), down_tile(slot + 1, tile), op.down.tile_bytes);
  });
}

// ---------------------------------------------------------------- gate and up, down

// Which sum of the pieces from u0 on this thread adds up, [piece][gate, up][8]: its slot (-1: none) and row.
__device__ inline int2 half_place(const StreamExperts& op, const Pieces& pieces, int u0) {
  const int n = u0 + static_cast<int>(threadIdx.x) / kPieceRows, g = threadIdx.x % kTileRows;
  if (n >= min(u0 + kRound, pieces.count)) return {-1, 0};
  const int tile = pieces.tile + n, slots = tile / op.gate.tiles_per_expert;
  const int row = (tile - slots * op.gate.tiles_per_expert) * kTileRows + g;
  return {row < op.gate.rows ? pieces.slot + slots : -1, row};
}
__device__ inline float half_bias(const StreamExperts& op, const Choice& choice, int2 place) {
  const float* bias = threadIdx.x % kPieceRows < kTileRows ? op.gate_bias : op.up_bias;
  if (place.x < 0 || bias == nullptr) return 0.0f;
  return __ldg(bias + choice.expert[place.x] * op.gate.rows + place.y);
}

// partial [piece][segment][gate, up][8]. first: of each thread, half_place of the first round.
template <int kPairs>
__device__ void gate_up(const MoeParams& p, const Choice& choice, const Pieces& pieces, Ring& ring,
                        const int2* first, const uint8_t* x, float* partial) {
  const StreamExperts& op = p.op;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const Segment segment(op.gate.pairs, warp);
  for (int u0 = 0; u0 < pieces.count; u0 += kRound) {
    const int count = min(kRound, pieces.count - u0);
    const int2 place = u0 == 0 ? first[threadIdx.x] : half_place(op, pieces, u0);
    const float bias = half_bias(op, choice, place);
    for (int n = 0; n < count; ++n, ring.advance()) {
      const uint8_t* stage = ring.wait_full();
      float sum[4] = {};
      multiply_segment<kPairs>(stage, stage + op.gate.tile_bytes, x, segment.first, segment.count, lane, sum);
      ring.release(lane);
      if (lane % 4 == 0) {
        float* to = partial + (n * kMultiplyWarps + warp) * kPieceRows + lane / 4;
        to[0] = sum[0] * kMx4Unscale;
        to[kTileRows] = sum[2] * kMx4Unscale;
      }
    }
    ptx::named_barrier<kMultiplyBarrier, kMultiplyThreads>();  // all partial sums of the round are there
    const int value = threadIdx.x % kPieceRows;
    float half = 0.0f;
    if (place.x >= 0) {
      half = add_segments<kMultiplyWarps>(
                 partial + threadIdx.x / kPieceRows * kMultiplyWarps * kPieceRows + value, kPieceRows) +
             bias;
    }
    const float up = __shfl_down_sync(kAllLanes, half, kTileRows);
    if (place.x >= 0 && value < kTileRows) store_act(op, place.x, place.y, activate(op.activation, half, up));
    ptx::named_barrier<kMultiplyBarrier, kMultiplyThreads>();  // and read, and the activations written
  }
}
static_assert(kRound * kPieceRows <= kMultiplyThreads);

// A warp's segment of the k rows of activations, to where it alone reads it: four slots at a time, 16 bytes a
// lane.
template <int kPairs>
__device__ void load_act(const StreamExperts& op, const Segment& segment, uint8_t* rows, int lane) {
  constexpr int kRow = kPairs * 8;
  const uint32_t stride = static_cast<uint32_t>(op.down.pairs) * kPairColumns * 2;
  const int cols = static_cast<int>(op.down.cols), first = segment.first * kPairColumns;
  const auto* act = reinterpret_cast<const uint16_t*>(op.act);
  for (int s = 0; s < op.k; s += 4) {
    uint4 v[kPairs];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = j * kWarpLanes + lane, slot = s + i / kRow, column = first + i % kRow * 8;
      v[j] = uint4{0u, 0u, 0u, 0u};
      if (slot < op.k && column < cols)
        v[j] = __ldcg(reinterpret_cast<const uint4*>(act + int64_t{slot} * cols + column));
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = j * kWarpLanes + lane, slot = s + i / kRow, at = i % kRow;
      if (slot < op.k && at < segment.count * 8)
        *reinterpret_cast<uint4*>(rows + slot * stride + first * 2 + at * 16) = v[j];
    }
  }
  __syncwarp();
}

// partial [slot][tile][segment][8].
template <int kPairs>
__device__ void down(const MoeParams& p, const Choice& choice, const Pieces& pieces, Ring& ring,
                     uint8_t* rows, float* partial, uint32_t everybody) {
  const StreamExperts& op = p.op;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const Segment segment(op.down.pairs, warp);
  const uint32_t stride = static_cast<uint32_t>(op.down.pairs) * kPairColumns * 2;
  constexpr int kSlot = kDownTiles * kMultiplyWarps * kTileRows;
  for (int u0 = 0; u0 < pieces.down_tiles; u0 += kDownTiles) {
    const int count = min(kDownTiles, pieces.down_tiles - u0), first = pieces.first_tile + u0;
    const DownOutput out = find_down(op, choice, first + min(warp, count - 1), lane);
    if (u0 == 0) {
      if (threadIdx.x == 0) ptx::wait_count(&p.sync->arrived, everybody);
      ptx::named_barrier<kMultiplyBarrier, kMultiplyThreads>();  // all CTAs' activations are there
      load_act<kPairs>(op, segment, rows, lane);
    }
    for (int slot = 0; slot < op.k; slot += 2) {
      const uint8_t* row = rows + (slot + lane / 4 % 2) * stride;
      float* to = partial + slot * kSlot + warp * kTileRows + lane / 4;
      for (int n = 0; n < count; ++n, ring.advance(), to += kMultiplyWarps * kTileRows) {
        const uint8_t* stage = ring.wait_full();
        float sum[4] = {};
        multiply_segment<kPairs>(stage, stage + op.down.tile_bytes, row, segment.first, segment.count, lane,
                                 sum);
        ring.release(lane);
        if (lane % 4 != 0) continue;
        to[0] = sum[0] * kMx4Unscale;
        to[kSlot] = sum[3] * kMx4Unscale;
      }
    }
    ptx::named_barrier<kMultiplyBarrier, kMultiplyThreads>();  // all partial sums of the round are there
    if (warp < count) {
      finish_down<kMultiplyWarps>(op, choice, out, partial + warp * kMultiplyWarps * kTileRows, kSlot,
                                  first + warp, lane);
    }
    if (u0 + kDownTiles < pieces.down_tiles)
      ptx::named_barrier<kMultiplyBarrier, kMultiplyThreads>();  // and read, before the next round's
  }
}

template <int kPairs>
__global__ void __launch_bounds__(kThreads, 2) mx4_moe_kernel(const __grid_constant__ MoeParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Choice choice;
  __shared__ Pieces known;
  __shared__ uint64_t router_full;
  __shared__ float parts[kRowThreads / kWarpLanes];
  const StreamExperts& op = p.op;
  Ring ring = p.shape.ring(shared, kMultiplyWarps);
  uint8_t* rows = p.shape.rows(shared);  // the normed row and gate's and up's partial sums; then activations
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const bool scores = static_cast<int>(blockIdx.x) < op.experts;
  auto* router = reinterpret_cast<float4*>(shared);  // where the ring will be
  float4* normed = router + p.route.cols / 4;
  if (threadIdx.x == kMultiplyThreads) {
    ring.init();
    ptx::barrier_init(&router_full, 1);
    ptx::barrier_init_fence();
    if (scores) {
      const auto bytes = static_cast<uint32_t>(p.route.cols) * 4u;
      ptx::barrier_arrive_expect(&router_full, bytes);
      ptx::bulk_copy(router, p.route.router + int64_t{blockIdx.x} * p.route.cols, bytes, &router_full);
    }
  }
  ptx::let_dependents_start();
  HeldQuads weight;
  if (threadIdx.x < kRowThreads)
    weight.load<false>(reinterpret_cast<const float4*>(p.route.norm_weight), p.route.cols / 4, threadIdx.x);
  const float bias = scores && p.route.bias != nullptr ? __ldg(p.route.bias + blockIdx.x) : 0.0f;
  auto* first = reinterpret_cast<int2*>(p.shape.partial(shared));  // until down needs it
  {
    const Pieces found = find_pieces(op);
    if (threadIdx.x < kMultiplyThreads) first[threadIdx.x] = half_place(op, found, 0);
    if (threadIdx.x == 0) known = found;
  }
  __syncthreads();  // the barriers are there
  ptx::wait_for_previous();
  const uint32_t epoch = __ldcg(&p.sync->epoch);  // how many such kernels there have been
  if (threadIdx.x < kRowThreads) {
    norm_to_shared(p.route, weight, op.gate.pairs, parts, rows, scores ? normed : nullptr);
    if (scores) {
      ptx::barrier_wait(&router_full, 0);
      ptx::named_barrier<kNormBarrier, kRowThreads>();  // the normed row is there, and `parts` read
      score(p, router, normed, bias, parts, epoch + 1);
      ptx::publish_to_async();  // the ring's copies come after what was read and written here
    }
  }
  __syncthreads();  // the normed row is there, the ring's memory free

  const Pieces pieces = known;
  if (warp == kMultiplyWarps) choose_when_there(p, epoch + 1, lane, choice);
  __syncthreads();  // the choice is there
  if (warp == kMultiplyWarps) {
    if (lane == 0) bring(op, choice, pieces, ring);
    return;
  }
  auto* partial = reinterpret_cast<float*>(rows + static_cast<uint32_t>(op.gate.pairs) * kPairColumns * 2);
  gate_up<kPairs>(p, choice, pieces, ring, first, rows, partial);
  const uint32_t everybody = (epoch + 1) * gridDim.x;
  if (threadIdx.x == 0) ptx::add_release(&p.sync->arrived, 1);
  down<kPairs>(p, choice, pieces, ring, rows, p.shape.partial(shared), everybody);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    ptx::wait_count(&p.sync->arrived, everybody);  // so everybody has read the epoch
    p.sync->epoch = epoch + 1;
  }
}

uint32_t row_bytes(const PackedMatrix& w) { return static_cast<uint32_t>(w.pairs) * kPairColumns * 2; }

StreamShape moe_shape(const StreamExperts& op, const Device& device) {
  StreamShape shape;
  const uint32_t most = op.gate.tile_bytes > op.down.tile_bytes ? op.gate.tile_bytes : op.down.tile_bytes;
  const auto k = static_cast<uint32_t>(op.k);
  const uint32_t gate_up = row_bytes(op.gate) + kRound * kMultiplyWarps * kPieceRows * sizeof(float);
  const uint32_t act = k * row_bytes(op.down);
  shape.stage_bytes = 2 * most;
  shape.rows_bytes = gate_up > act ? gate_up : act;
  static_assert(2 * kDownTiles * kTileRows * sizeof(float) >=
                kWarpLanes * sizeof(int2));  // half_place, k >= 2
  shape.partial_bytes = k * kDownTiles * kMultiplyWarps * kTileRows * sizeof(float);
  const uint32_t fixed = shape.total();
  const uint32_t most_here = device.max_shared_memory() < kMoeBytes ? device.max_shared_memory() : kMoeBytes;
  const uint32_t fit = fixed < most_here ? (most_here - fixed) / shape.stage_bytes : 0;
  shape.stages = static_cast<int32_t>(fit < kMaxStages ? fit : kMaxStages);
  return shape;
}

template <int kPairs>
void launch(const MoeParams& p, const Launch& at) {
  const auto kernel = mx4_moe_kernel<kPairs>;
  allow_shared_memory(kernel, p.shape.total());
  launch_dependent("mx4_moe_kernel", kernel, dim3(static_cast<unsigned>(at.device.sm_count())), kThreads,
                   p.shape.total(), at, p);
}

}  // namespace

bool fits_stream_moe(const StreamRoute& route, const StreamExperts& op, const Device& device) {
  const auto is_mx4 = [](const PackedMatrix& w) { return w.format == PackedFormat::kMx4; };
  if (!is_mx4(op.gate) || !is_mx4(op.up) || !is_mx4(op.down)) return false;
  if (!device.has_bulk_copies()) return false;
  if (op.tokens != 1 || op.k > kMaxChosen || op.k % 2 != 0 || op.experts > kMostExperts ||
      op.experts > device.sm_count())
    return false;
  const int per = pairs_per_segment(op.gate.pairs);
  const auto last_is_empty = [&](const PackedMatrix& w) { return w.pairs <= kMultiplyWarps * per; };
  if (per > 4 || pairs_per_segment(op.down.pairs) != per || !last_is_empty(op.gate) ||
      !last_is_empty(op.down))
    return false;
  if (route.cols % 32 != 0 || route.cols != op.gate.cols || op.gate.rows != op.down.cols) return false;
  const StreamShape shape = moe_shape(op, device);
  // And room for a router's row and the normed one where the ring will be.
  return shape.stages >= 2 && static_cast<uint32_t>(shape.stages) * shape.stage_bytes >=
                                  2 * static_cast<uint32_t>(route.cols) * sizeof(float);
}

void launch_stream_moe(const StreamRoute& route, const StreamExperts& op, MoeSync* sync, const Launch& at) {
  const MoeParams p{route, op, moe_shape(op, at.device), sync};
  const int per = pairs_per_segment(op.gate.pairs);
  if (per == 1) return launch<1>(p, at);
  if (per == 2) return launch<2>(p, at);
  if (per == 3) return launch<3>(p, at);
  launch<4>(p, at);
}

}  // namespace millrace::cuda
