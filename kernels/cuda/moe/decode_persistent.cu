// The router and the experts of one token in one persistent kernel, a CTA to each SM, all resident. What two
// kernels would wait for at their boundary goes through words in global memory, and the ring of weights does
// not stop: while gate and up are added up and all CTAs wait for one another, down's tiles arrive.
//
// A CTA is fifteen or sixteen consumer warps, one per split-K segment (of MXFP4 with 2,880 columns the
// sixteenth is empty), and a producer warp. In turn: the norm of the row (every CTA for itself) and one
// expert's score in each of the first CTAs; top-k routing, in every CTA, when all scores are there; gate and
// up of some tiles; all CTAs wait until the activations are there; down of some tiles.
//
// Roofline: gpt-oss-20b: 52.9 MB of tiles, 12.3 us at B = 4.3 TB/s, after some 4 us in which nothing can be
// loaded: the row, the scores, the choice and the first bytes. Some 38 instructions of a warp per 16 x 32
// weights, 7 us of issue slots.
#include "kernels/cuda/gemv/experts.cuh"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/norm/rmsnorm_row.cuh"
#include "millrace/kernels/tile/ptx/grid_sync.cuh"

namespace millrace::cuda {
namespace {

// kConsumerWarps: split-K segments that are not empty, or more. kUpSteps, kDownSteps: K steps of a whole
// segment.
template <PackedFormat kFormat, int kWarps, int kUp, int kDown>
struct MoeConfig {
  using Format = ExpertFormat<kFormat>;
  static constexpr float kUnscale = TileFormat<kFormat>::kUnscale;
  static constexpr int kConsumerWarps = kWarps, kUpSteps = kUp, kDownSteps = kDown;
  static constexpr int kConsumerThreads = kWarps * kWarpLanes, kThreads = kConsumerThreads + kWarpLanes;
};
constexpr int kRound = 12;  // work items of gate and up whose partial sums are kept before they are added up
constexpr int kScoreWarps = 4;  // of an expert's score: the sum's order, as in router.cu
constexpr int kNormBarrier = 1, kConsumerBarrier = 2;
constexpr int kMaxExperts = kRegisterScores * kWarpLanes;

struct MoeParams {
  Router router;
  GemvExperts op;
  GemvLayout layout;
  PersistentMoeSync* sync;
};

// ---------------------------------------------------------------- the router

// The first kRowThreads threads: the row's norm, as bf16 (and zeros in a missing last block) to x, and,
// unless that is null, as float32 to `normed`.
__device__ inline void norm_to_shared(const Router& op, const RegisterQuads& weight, int k_steps,
                                      float* partial, uint8_t* x, float4* normed) {
  const int quads = op.cols / 4, thread = threadIdx.x;
  const auto* from = reinterpret_cast<const float4*>(op.x);
  RegisterQuads kept;
  kept.load<true>(from, quads, thread);
  const float scale = row_inverse_rms<kNormBarrier>(from, kept, quads, op.eps, thread, partial);
#pragma unroll
  for (int j = 0; j < kRegisterQuads; ++j) {
    const int i = j * kRowThreads + thread;
    const float4 v = norm_quad(kept.v[j], scale, weight.v[j]);  // zeros past the last
    if (i < k_steps * (kKStepColumns / 4)) {
      reinterpret_cast<uint2*>(x)[i] = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    }
    if (normed != nullptr && i < quads) normed[i] = v;
  }
}

// One expert's score, by kScoreWarps warps and in the order of router.cu's sum.
__device__ inline void score(const MoeParams& p, const float4* router, const float4* normed, float bias,
                             float* parts, uint32_t tag) {
  const int quads = p.router.cols / 4, thread = threadIdx.x;
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
  ptx::named_barrier<kNormBarrier, kRowThreads>();  // all wait for the parts
  if (thread != 0) return;
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kScoreWarps; ++i) all += parts[i];
  ptx::store_tagged(p.sync->scores + blockIdx.x, __float_as_uint(all + bias), tag);
}

// The producer warp: top-k routing, when all scores are there.
__device__ inline void route_when_scored(const MoeParams& p, uint32_t tag, int lane, TopK& chosen) {
  LaneScores scores;
  scores.experts = p.op.experts;
#pragma unroll
  for (int i = 0; i < kRegisterScores; ++i) {
    const int e = i * kWarpLanes + lane;
    scores.kept[i] =
        e < p.op.experts ? __uint_as_float(ptx::wait_tagged(p.sync->scores + e, tag)) : -INFINITY;
  }
  route_top_k(scores, p.op.k, p.op.softmax_over_all, lane, chosen.expert, chosen.weight);
}

// ---------------------------------------------------------------- work items

// A CTA's work items of two tiles: gate and up of 8 rows, then down of 8 rows for one slot and the next.
// Known before the experts are chosen: what follows that should be short.
struct WorkItems {
  int count, slot, tile;       // of gate and up, and the first one's
  int first_tile, down_tiles;  // of down

  // f(slot, tile) for each item of gate and up, in order.
  template <class F>
  __device__ void each_gate_up(const GemvExperts& op, F&& f) const {
    for (int i = 0, s = slot, t = tile; i < count; ++i) {
      f(s, t);
      if (++t == op.gate.tiles_per_expert) t = 0, ++s;
    }
  }
  // The same of down: rounds of kDownTiles tiles, in these two slots after two; the first of the two.
  template <class F>
  __device__ void each_down(const GemvExperts& op, F&& f) const {
    for (int u0 = 0; u0 < down_tiles; u0 += kDownTiles) {
      const int here = min(kDownTiles, down_tiles - u0);
      for (int s = 0; s < op.k; s += 2) {
        for (int n = 0; n < here; ++n) f(s, first_tile + u0 + n);
      }
    }
  }
};

__device__ inline WorkItems find_items(const GemvExperts& op) {
  const auto cut = [](int total, unsigned at) {
    return static_cast<int>(at * static_cast<unsigned>(total) / gridDim.x);
  };
  const int per = op.gate.tiles_per_expert, total = op.k * per, down = op.down.tiles_per_expert;
  const int first = cut(total, blockIdx.x), first_tile = cut(down, blockIdx.x);
  return {cut(total, blockIdx.x + 1) - first, first / per, first % per, first_tile,
          cut(down, blockIdx.x + 1) - first_tile};
}

// The producer thread: loads all items.
__device__ inline void load_items(const GemvExperts& op, const TopK& chosen, const WorkItems& items,
                                  Ring ring) {
  const auto copy = [&](const uint8_t* low, const uint8_t* high, uint32_t bytes) {
    ring.acquire(2 * bytes);
    ring.copy(0, low, bytes);
    ring.copy(bytes, high, bytes);
    ring.advance();
  };
  items.each_gate_up(op, [&](int slot, int tile) {
    const int expert = chosen.expert[slot];
    copy(expert_tile(op.gate, expert, tile), expert_tile(op.up, expert, tile), op.gate.tile_bytes);
  });
  const auto down_tile = [&](int slot, int tile) { return expert_tile(op.down, chosen.expert[slot], tile); };
  int n = 0;
  items.each_down(op, [&](int slot, int tile) {
    if (n++ == ring.stages) {  // the ring is full until all CTAs have arrived: the rest goes to L2
      int i = 0;
      items.each_down(op, [&](int next_slot, int row) {
        if (i++ < ring.stages) return;
        ptx::prefetch_l2(down_tile(next_slot, row), op.down.tile_bytes);
        ptx::prefetch_l2(down_tile(next_slot + 1, row), op.down.tile_bytes);
      });
    }
    copy(down_tile(slot, tile), down_tile(slot + 1, tile), op.down.tile_bytes);
  });
}

// ---------------------------------------------------------------- gate and up, down

// Which sum of the items from u0 on this thread adds up, [item][gate, up][8]: its slot (-1: none) and row.
__device__ inline int2 half_output(const GemvExperts& op, const WorkItems& items, int u0) {
  const int n = u0 + static_cast<int>(threadIdx.x) / kItemRows, g = threadIdx.x % kTileRows;
  if (n >= min(u0 + kRound, items.count)) return {-1, 0};
  const int tile = items.tile + n, slots = tile / op.gate.tiles_per_expert;
  const int row = (tile - slots * op.gate.tiles_per_expert) * kTileRows + g;
  return {row < op.gate.rows ? items.slot + slots : -1, row};
}
__device__ inline float half_bias(const GemvExperts& op, const TopK& chosen, int2 half_of) {
  const float* bias = threadIdx.x % kItemRows < kTileRows ? op.gate_bias : op.up_bias;
  if (half_of.x < 0 || bias == nullptr) return 0.0f;
  return __ldg(bias + chosen.expert[half_of.x] * op.gate.rows + half_of.y);
}

// partial [item][segment][gate, up][8]. first: of each thread, half_output of the first round.
template <class Config>
__device__ void gate_up(const MoeParams& p, const TopK& chosen, const WorkItems& items, Ring& ring,
                        const int2* first, const uint8_t* x, float* partial) {
  constexpr int kConsumerWarps = Config::kConsumerWarps;
  const GemvExperts& op = p.op;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const WarpSegment segment(op.gate.k_steps, warp);
  for (int u0 = 0; u0 < items.count; u0 += kRound) {
    const int count = min(kRound, items.count - u0);
    const int2 half_of = u0 == 0 ? first[threadIdx.x] : half_output(op, items, u0);
    const float bias = half_bias(op, chosen, half_of);
    for (int n = 0; n < count; ++n, ring.advance()) {
      const uint8_t* stage = ring.wait_full();
      float sum[4] = {};
      Config::Format::template multiply<Config::kUpSteps>(stage, stage + op.gate.tile_bytes, x, segment, lane,
                                                          sum);
      ring.release(lane);
      if (lane % 4 == 0) {
        float* to = partial + (n * kConsumerWarps + warp) * kItemRows + lane / 4;
        to[0] = sum[0] * Config::kUnscale;
        to[kTileRows] = sum[2] * Config::kUnscale;
      }
    }
    ptx::named_barrier<kConsumerBarrier,
                       Config::kConsumerThreads>();  // all wait for the round's partial sums
    const int value = threadIdx.x % kItemRows;
    float half = 0.0f;
    if (half_of.x >= 0) {
      half = add_segments<kConsumerWarps>(
                 partial + threadIdx.x / kItemRows * kConsumerWarps * kItemRows + value, kItemRows) +
             bias;
    }
    const float up = __shfl_down_sync(kAllLanes, half, kTileRows);
    if (half_of.x >= 0 && value < kTileRows)
      store_act(op, half_of.x, half_of.y, activate(op.activation, half, up));
    ptx::named_barrier<kConsumerBarrier,
                       Config::kConsumerThreads>();  // and read, and the activations written
  }
}
static_assert(kRound * kItemRows <= (kSplitK - 1) * kWarpLanes);  // a sum each

// A warp's segment of the k rows of activations, to where it alone reads it: four slots at a time, 16 bytes a
// lane.
template <int kKSteps>
__device__ void load_act(const GemvExperts& op, const WarpSegment& segment, uint8_t* rows, int lane) {
  constexpr int kRow = kKSteps * 8;
  const uint32_t stride = static_cast<uint32_t>(op.down.k_steps) * kKStepColumns * 2;
  const int cols = static_cast<int>(op.down.cols), first = segment.first * kKStepColumns;
  const auto* act = reinterpret_cast<const uint16_t*>(op.act);
  for (int s = 0; s < op.k; s += 4) {
    uint4 v[kKSteps];
#pragma unroll
    for (int j = 0; j < kKSteps; ++j) {
      const int i = j * kWarpLanes + lane, slot = s + i / kRow, column = first + i % kRow * 8;
      v[j] = uint4{0u, 0u, 0u, 0u};
      if (slot < op.k && column < cols)
        v[j] = __ldcg(reinterpret_cast<const uint4*>(act + int64_t{slot} * cols + column));
    }
#pragma unroll
    for (int j = 0; j < kKSteps; ++j) {
      const int i = j * kWarpLanes + lane, slot = s + i / kRow, at = i % kRow;
      if (slot < op.k && at < segment.count * 8)
        *reinterpret_cast<uint4*>(rows + slot * stride + first * 2 + at * 16) = v[j];
    }
  }
  __syncwarp();
}

// partial [slot][tile][segment][8].
template <class Config>
__device__ void down(const MoeParams& p, const TopK& chosen, const WorkItems& items, Ring& ring,
                     uint8_t* rows, float* partial, uint32_t all_ctas) {
  constexpr int kConsumerWarps = Config::kConsumerWarps;
  const GemvExperts& op = p.op;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const WarpSegment segment(op.down.k_steps, warp);
  const uint32_t stride = static_cast<uint32_t>(op.down.k_steps) * kKStepColumns * 2;
  constexpr int kSlot = kDownTiles * kConsumerWarps * kTileRows;
  for (int u0 = 0; u0 < items.down_tiles; u0 += kDownTiles) {
    const int count = min(kDownTiles, items.down_tiles - u0), first = items.first_tile + u0;
    const DownOutput out = load_down_output(op, chosen, first + min(warp, count - 1), lane);
    if (u0 == 0) {
      if (threadIdx.x == 0) ptx::wait_count(&p.sync->arrived, all_ctas);
      ptx::named_barrier<kConsumerBarrier, Config::kConsumerThreads>();  // all wait for all CTAs' activations
      load_act<Config::kDownSteps>(op, segment, rows, lane);
    }
    for (int slot = 0; slot < op.k; slot += 2) {
      const uint8_t* row = rows + (slot + lane / 4 % 2) * stride;
      float* to = partial + slot * kSlot + warp * kTileRows + lane / 4;
      for (int n = 0; n < count; ++n, ring.advance(), to += kConsumerWarps * kTileRows) {
        const uint8_t* stage = ring.wait_full();
        float sum[4] = {};
        Config::Format::template multiply<Config::kDownSteps>(stage, stage + op.down.tile_bytes, row, segment,
                                                              lane, sum);
        ring.release(lane);
        if (lane % 4 != 0) continue;
        to[0] = sum[0] * Config::kUnscale;
        to[kSlot] = sum[3] * Config::kUnscale;
      }
    }
    ptx::named_barrier<kConsumerBarrier,
                       Config::kConsumerThreads>();  // all wait for the round's partial sums
    if (warp < count) {
      store_down_output<kConsumerWarps>(op, chosen, out, partial + warp * kConsumerWarps * kTileRows, kSlot,
                                        first + warp, lane);
    }
    if (u0 + kDownTiles < items.down_tiles)
      ptx::named_barrier<kConsumerBarrier, Config::kConsumerThreads>();  // and read, before the next round's
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kConsumerWarps < kSplitK ? 2 : 1)
    persistent_moe_kernel(const __grid_constant__ MoeParams p) {
  constexpr int kConsumerWarps = Config::kConsumerWarps, kConsumerThreads = Config::kConsumerThreads;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ TopK chosen;
  __shared__ WorkItems known;
  __shared__ uint64_t router_full;
  __shared__ float parts[kRowThreads / kWarpLanes];
  const GemvExperts& op = p.op;
  Ring ring = p.layout.ring(shared, kConsumerWarps);
  uint8_t* rows = p.layout.rows(shared);  // the normed row and gate's and up's partial sums; then activations
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const bool scores = static_cast<int>(blockIdx.x) < op.experts;
  auto* router = reinterpret_cast<float4*>(shared);  // where the ring will be
  float4* normed = router + p.router.cols / 4;
  if (threadIdx.x == kConsumerThreads) {
    ring.init();
    ptx::barrier_init(&router_full, 1);
    ptx::barrier_init_fence();
    if (scores) {
      const auto bytes = static_cast<uint32_t>(p.router.cols) * 4u;
      ptx::barrier_arrive_expect(&router_full, bytes);
      ptx::bulk_copy(router, p.router.weight + int64_t{blockIdx.x} * p.router.cols, bytes, &router_full);
    }
  }
  ptx::let_dependents_start();
  RegisterQuads weight;
  if (threadIdx.x < kRowThreads)
    weight.load<false>(reinterpret_cast<const float4*>(p.router.norm_weight), p.router.cols / 4, threadIdx.x);
  const float bias = scores && p.router.bias != nullptr ? __ldg(p.router.bias + blockIdx.x) : 0.0f;
  auto* first = reinterpret_cast<int2*>(p.layout.partial(shared));  // until down needs it
  {
    const WorkItems found = find_items(op);
    if (threadIdx.x < kConsumerThreads) first[threadIdx.x] = half_output(op, found, 0);
    if (threadIdx.x == 0) known = found;
  }
  __syncthreads();  // all wait for the barriers' init
  ptx::wait_for_previous();
  const uint32_t epoch = __ldcg(&p.sync->epoch);  // how many such kernels there have been
  if (threadIdx.x < kRowThreads) {
    norm_to_shared(p.router, weight, op.gate.k_steps, parts, rows, scores ? normed : nullptr);
    if (scores) {
      ptx::barrier_wait(&router_full, 0);
      ptx::named_barrier<kNormBarrier,
                         kRowThreads>();  // all wait for the normed row, and until `parts` is read
      score(p, router, normed, bias, parts, epoch + 1);
      ptx::publish_to_async();  // the ring's copies come after what was read and written here
    }
  }
  __syncthreads();  // all wait for the normed row and until the ring's memory is free

  const WorkItems items = known;
  if (warp == kConsumerWarps) route_when_scored(p, epoch + 1, lane, chosen);
  __syncthreads();  // all wait for the choice
  if (warp == kConsumerWarps) {
    if (lane == 0) load_items(op, chosen, items, ring);
    return;
  }
  auto* partial = reinterpret_cast<float*>(rows + static_cast<uint32_t>(op.gate.k_steps) * kKStepColumns * 2);
  gate_up<Config>(p, chosen, items, ring, first, rows, partial);
  const uint32_t all_ctas = (epoch + 1) * gridDim.x;
  if (threadIdx.x == 0) ptx::add_release(&p.sync->arrived, 1);
  down<Config>(p, chosen, items, ring, rows, p.layout.partial(shared), all_ctas);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    ptx::wait_count(&p.sync->arrived, all_ctas);  // so all have read the epoch
    p.sync->epoch = epoch + 1;
  }
}

// The warps of a CTA that multiply: the last segment of MXFP4's is empty.
int consumer_warps(const GemvExperts& op) {
  return op.gate.format == PackedFormat::kMxfp4 ? kSplitK - 1 : kSplitK;
}

GemvLayout moe_layout(const GemvExperts& op, const Device& device) {
  GemvLayout layout;
  const uint32_t max_tile = op.gate.tile_bytes > op.down.tile_bytes ? op.gate.tile_bytes : op.down.tile_bytes;
  const auto k = static_cast<uint32_t>(op.k), warps = static_cast<uint32_t>(consumer_warps(op));
  const uint32_t gate_up = row_bytes(op.gate) + kRound * warps * kItemRows * sizeof(float);
  const uint32_t act = k * row_bytes(op.down);
  layout.stage_bytes = 2 * max_tile;
  layout.rows_bytes = gate_up > act ? gate_up : act;
  static_assert(2 * kDownTiles * kTileRows * sizeof(float) >=
                kWarpLanes * sizeof(int2));  // half_output, k >= 2
  layout.partial_bytes = k * kDownTiles * warps * kTileRows * sizeof(float);
  const uint32_t fixed = layout.total();
  const uint32_t most = op.gate.format == PackedFormat::kMxfp4 ? kPersistentBytes : kDeepBytes;
  const uint32_t limit = device.max_shared_memory() < most ? device.max_shared_memory() : most;
  const uint32_t fit = fixed < limit ? (limit - fixed) / layout.stage_bytes : 0;
  layout.stages = static_cast<int32_t>(fit < kMaxStages ? fit : kMaxStages);
  return layout;
}

template <class Config>
void launch(const MoeParams& p, const Launch& at) {
  const auto kernel = persistent_moe_kernel<Config>;
  allow_shared_memory(kernel, p.layout.total());
  launch_dependent("persistent_moe_kernel", kernel, dim3(static_cast<unsigned>(at.device.sm_count())),
                   Config::kThreads, p.layout.total(), at, p);
}

}  // namespace

bool supports_persistent_moe(const Router& router, const GemvExperts& op, const Device& device) {
  const PackedFormat format = op.gate.format;
  if (format != PackedFormat::kMxfp4 && format != PackedFormat::kQ4) return false;
  if (op.up.format != format || op.down.format != format) return false;
  if (!device.has_bulk_copies()) return false;
  if (op.tokens != 1 || op.k > kMaxTopK || op.k % 2 != 0 || op.experts > kMaxExperts ||
      op.experts > device.sm_count())
    return false;
  const int up = k_steps_per_segment(op.gate.k_steps), down = k_steps_per_segment(op.down.k_steps);
  const bool has_kernel = format == PackedFormat::kMxfp4 ? up <= 4 && down == up : up == 2 && down == 1;
  const auto fits = [&](const PackedMatrix& w, int per) { return w.k_steps <= consumer_warps(op) * per; };
  if (!has_kernel || !fits(op.gate, up) || !fits(op.down, down)) return false;
  if (router.cols % 32 != 0 || router.cols != op.gate.cols || op.gate.rows != op.down.cols) return false;
  const GemvLayout layout = moe_layout(op, device);
  // And room for a router's row and the normed one where the ring will be.
  return layout.stages >= 2 && static_cast<uint32_t>(layout.stages) * layout.stage_bytes >=
                                   2 * static_cast<uint32_t>(router.cols) * sizeof(float);
}

void launch_persistent_moe(const Router& router, const GemvExperts& op, PersistentMoeSync* sync,
                           const Launch& at) {
  using enum PackedFormat;
  const MoeParams p{router, op, moe_layout(op, at.device), sync};
  const int per = k_steps_per_segment(op.gate.k_steps);
  if (op.gate.format == kQ4) return launch<MoeConfig<kQ4, kSplitK, 2, 1>>(p, at);
  if (per == 1) return launch<MoeConfig<kMxfp4, kSplitK - 1, 1, 1>>(p, at);
  if (per == 2) return launch<MoeConfig<kMxfp4, kSplitK - 1, 2, 2>>(p, at);
  if (per == 3) return launch<MoeConfig<kMxfp4, kSplitK - 1, 3, 3>>(p, at);
  launch<MoeConfig<kMxfp4, kSplitK - 1, 4, 4>>(p, at);
}

}  // namespace millrace::cuda
