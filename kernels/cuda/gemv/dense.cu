// GEMV: products of one to four rows with packed matrices: norm, QKV, output projection, gate and up with
// their activation, down, logits.
//
// A CTA is sixteen warps, one per split-K segment (tile/weight_format.cuh), and each has a ring of its own in
// shared memory: a stage is some K steps of its segment of one tile of 8 rows, one bulk copy, which the
// warp's first lane issues as soon as the warp has read what lay there. No warp waits for another before a
// round of tiles is done, so that the copies never stop. Two tiles make the 16 rows of a product: neighbours,
// or gate and up of the same rows. Rows of activations lie in shared memory as bf16; the product's columns
// are tokens.
//
//   warp w:  [stage 0][stage 1]..[stage S-1]   K steps of a low and a high tile each
//            wait -> products -> the stage is loaded again, S stages on
//
// Roofline: the tiles' bytes at B = 4.3 TB/s (measured copy of an H200), 33 bytes a nanosecond of an SM. At 4
// bits a K step of two tiles is 640 bytes, 20 ns, some 140 issue slots; its products take some 65.
#include <algorithm>

#include "kernels/cuda/gemv/dense_tiles.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gemv/row.cuh"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = kSplitK;
constexpr int kThreads = kWarps * kWarpLanes;
static_assert(kThreads == kRoundThreads);
constexpr int kRoundPairs = 4;  // pairs of tiles whose partial sums are kept before they are added up
constexpr int kMaxWarpStages = 16;

struct Params {
  Gemv op;
  int32_t total_tiles;  // with gate and up: of either
  int32_t cols, k_steps, stages;
  uint32_t tile_bytes, rows_bytes, partial_bytes;
};

// K steps of a stage: copies of some 1 KB.
constexpr int stage_k_steps(PackedFormat format) {
  return format == PackedFormat::kBf16 ? 1 : format == PackedFormat::kQ4 ? 4 : 2;
}

// Partial sums of a round, [pair][low, high][segment][8 rows][tokens]; the tiles' ones start in different
// banks.
__host__ __device__ inline int half_floats(int tokens) { return (kSplitK + 1) * kTileRows * tokens; }
__host__ __device__ inline int round_floats(int tokens) { return kRoundPairs * 2 * half_floats(tokens); }

// ---------------------------------------------------------------- a warp's ring

// The warp's stages, and what it loads: kSteps K steps of its segment of a pair of tiles, low and high; then
// the next K steps of the pair, then the next pair.
template <PackedFormat kFormat, int kSteps, bool kGateUp>
struct WarpRing {
  static constexpr int kKStepBytes = TileFormat<kFormat>::kKStepBytes;
  static constexpr uint32_t kTileBytes = kSteps * kKStepBytes, kStageBytes = 2 * kTileBytes;

  const Params& p;
  uint8_t* data;
  uint64_t* full;
  int first, last;  // tiles of the CTA: pairs from first on, the last perhaps a low tile alone
  WarpSegment segment;
  int chunks, pairs;  // of the segment, of the CTA
  int stage = 0;
  uint32_t parity = 0;
  // What is to be loaded next: K steps `chunk` and on of a pair, whose segment lies there.
  int pair = 0, chunk = 0;
  const uint8_t *low = nullptr, *high = nullptr;

  __device__ const uint8_t* source(int of_pair, int half) const {
    const int64_t at = int64_t{segment.first} * kKStepBytes;
    if constexpr (kGateUp) {
      return p.op.parts[half].w.tiles + int64_t{first + of_pair} * p.tile_bytes + at;
    } else {
      // A missing last tile: the low one again.
      const GemvTile tile = find_tile(p.op, min(first + 2 * of_pair + half, last - 1));
      return tile.part->w.tiles + int64_t{tile.tile} * p.tile_bytes + at;
    }
  }
  __device__ void seek(int item) {
    pair = item / chunks, chunk = item % chunks;
    if (pair < pairs) low = source(pair, 0), high = source(pair, 1);
  }
  __device__ void load(int at) const {
    const int begin = chunk * kSteps;
    const auto bytes = static_cast<uint32_t>(min(kSteps, segment.count - begin) * kKStepBytes);
    uint8_t* to = data + static_cast<uint32_t>(at) * kStageBytes;
    ptx::barrier_arrive_expect(full + at, 2 * bytes);
    ptx::bulk_copy(to, low + begin * kKStepBytes, bytes, full + at);
    ptx::bulk_copy(to + kTileBytes, high + begin * kKStepBytes, bytes, full + at);
  }
  // The whole warp: barriers, then all stages, a lane each. The first lane goes on loading.
  __device__ void fill(int lane) {
    if (chunks == 0) return;
    if (lane < p.stages) ptx::barrier_init(full + lane, 1);
    ptx::barrier_init_fence();
    __syncwarp();  // the barriers are there for every lane
    seek(lane);
    if (lane < p.stages && pair < pairs) load(lane);
    seek(p.stages);
  }
  __device__ const uint8_t* wait() const {
    ptx::barrier_wait(full + stage, parity);
    return data + static_cast<uint32_t>(stage) * kStageBytes;
  }
  // After the warp has read the stage: one thread loads into it what comes next.
  __device__ void refill() {
    if (pair >= pairs) return;
    load(stage);
    if (++chunk < chunks) return;
    chunk = 0;
    if (++pair < pairs) low = source(pair, 0), high = source(pair, 1);
  }
  __device__ void advance() {
    if (++stage == p.stages) stage = 0, parity ^= 1u;
  }
};

// ---------------------------------------------------------------- outputs

// One output of a round; bias and residual are loaded before the round's tiles are multiplied.
struct Output {
  int at = -1;  // among the round's partial sums; -1: this thread has none
  float* to = nullptr;
  float bias = 0.0f, old = 0.0f;
};
// Output i of `count` tiles from `first` on: [tile][8 rows][tokens].
__device__ inline Output load_output(const Params& p, int first, int count, int i) {
  Output out;
  const int tokens = p.op.tokens, values = kTileRows * tokens, n = i / values;
  if (n >= count) return out;
  const GemvTile tile = find_tile(p.op, first + n);
  const int64_t row = tile.tile * kTileRows + i % values / tokens;
  if (row >= tile.part->w.rows) return out;
  out.at = n * half_floats(tokens) + i % values;
  out.to = tile.part->out + i % tokens * tile.part->w.rows + row;
  if (tile.part->bias != nullptr) out.bias = __ldg(tile.part->bias + row);
  if (p.op.add) out.old = __ldcg(out.to);
  return out;
}
// What the segments give for one row of a tile.
__device__ inline float sum_segments(const float* partial, int values) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSplitK; ++s) sum += partial[s * values];
  return sum;
}

// The same of gate and up: [pair][8 rows][tokens].
template <class Format>
__device__ inline void store_activation(const Params& p, const float* partial, int first, int count, int i) {
  const int tokens = p.op.tokens, values = kTileRows * tokens, n = i / values;
  if (n >= count) return;
  const Gemv::Part &gate = p.op.parts[0], &up = p.op.parts[1];
  const int64_t row = int64_t{first + n} * kTileRows + i % values / tokens;
  if (row >= gate.w.rows) return;
  const float* mine = partial + 2 * n * half_floats(tokens) + i % values;
  const float g =
      sum_segments(mine, values) * Format::kUnscale + (gate.bias != nullptr ? __ldg(gate.bias + row) : 0.0f);
  const float u = sum_segments(mine + half_floats(tokens), values) * Format::kUnscale +
                  (up.bias != nullptr ? __ldg(up.bias + row) : 0.0f);
  reinterpret_cast<__nv_bfloat16*>(p.op.act)[i % tokens * gate.w.rows + row] =
      __float2bfloat16_rn(activate(p.op.activation, g, u));
}

// sum of a product's rows g and g + 8 for tokens 2t and 2t + 1. to: the pair's, of the warp's segment.
__device__ inline void store_partial(float* to, const float (&sum)[4], int tokens, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * t + i;
    if (token >= tokens) continue;
    to[g * tokens + token] = sum[i];
    to[half_floats(tokens) + g * tokens + token] = sum[2 + i];
  }
}

// ---------------------------------------------------------------- the kernel

// Rows of bf16 that an earlier kernel has rounded, to shared memory; the columns of a missing last block are
// zeros.
__device__ inline void copy_rows(const Params& p, uint8_t* rows, uint32_t stride) {
  const int quads = p.cols / 8, padded = p.k_steps * (kKStepColumns / 8);
  for (int t = 0; t < p.op.tokens; ++t) {
    const auto* from = reinterpret_cast<const uint4*>(p.op.x_bf16 + int64_t{t} * p.cols);
    auto* to = reinterpret_cast<uint4*>(rows + static_cast<uint32_t>(t) * stride);
    for (int i = threadIdx.x; i < padded; i += kThreads)
      to[i] = i < quads ? __ldcg(from + i) : uint4{0u, 0u, 0u, 0u};
  }
}

// kTokens: at most so many. kGateUp: gate and up of the same rows are a pair.
template <PackedFormat kFormat, int kSteps, int kTokens, bool kGateUp>
__global__ void __launch_bounds__(kThreads, 2) gemv_kernel(const __grid_constant__ Params p) {
  using Format = TileFormat<kFormat>;
  using Stages = WarpRing<kFormat, kSteps, kGateUp>;
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* rows = shared;
  auto* partials = reinterpret_cast<float*>(rows + p.rows_bytes);  // of two rounds
  auto* barriers = reinterpret_cast<uint64_t*>(rows + p.rows_bytes + p.partial_bytes);
  auto* stages = reinterpret_cast<uint8_t*>(barriers + kWarps * kMaxWarpStages);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int first = static_cast<int>(int64_t{blockIdx.x} * p.total_tiles / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * p.total_tiles / gridDim.x);
  const WarpSegment segment(p.k_steps, warp);
  Stages ring{p,
              stages + static_cast<uint32_t>(warp * p.stages) * Stages::kStageBytes,
              barriers + warp * kMaxWarpStages,
              first,
              last,
              segment,
              (segment.count + kSteps - 1) / kSteps,
              kGateUp ? last - first : (last - first + 1) / 2};
  ring.fill(lane);  // weights wait for nobody
  ptx::let_dependents_start();
  RowQuads norm_weight;
  norm_weight.load<false>(p.op.norm_weight, p.cols / 4);
  ptx::wait_for_previous();
  const int tokens = p.op.tokens, values = kTileRows * tokens;
  const uint32_t stride = gemv_row_stride(p.k_steps);
  if (p.op.x_bf16 != nullptr) {
    copy_rows(p, rows, stride);
  } else {
    const auto row = [&](int t) {
      return p.op.x + (p.op.source_rows != nullptr ? p.op.source_rows[t] : t) * int64_t{p.cols};
    };
    const auto store = [&](int t, int i, uint2 words) {
      reinterpret_cast<uint2*>(rows + static_cast<uint32_t>(t) * stride)[i] = words;
    };
    round_rows<kTokens>(tokens, row, p.op.norm_weight, norm_weight, p.op.eps, p.cols, partials, store);
  }
  __syncthreads();  // all wait for the rows as bf16

  const int token = activation_row<kFormat>(lane);
  const uint8_t* x = rows + (token < tokens ? token : 0) * stride + segment.first * (kKStepColumns * 2);
  const int pairs = ring.pairs;
  for (int pair0 = 0, round = 0; pair0 < pairs; pair0 += kRoundPairs, ++round) {
    const int count = min(kRoundPairs, pairs - pair0);
    const int tile0 = first + (kGateUp ? pair0 : 2 * pair0);
    const int tiles = min((kGateUp ? 1 : 2) * kRoundPairs, last - tile0);
    float* partial = partials + round % 2 * round_floats(tokens);
    Output out;
    if constexpr (!kGateUp) out = load_output(p, tile0, tiles, threadIdx.x);
    for (int n = 0; n < count; ++n) {
      float sum[4] = {};
      for (int chunk = 0; chunk < ring.chunks; ++chunk) {
        const uint8_t* low = ring.wait();
        const int begin = chunk * kSteps;
        multiply_segment<kFormat, kSteps, true>(low, low + Stages::kTileBytes,
                                                x + begin * (kKStepColumns * 2),
                                                min(kSteps, segment.count - begin), lane, sum);
        __syncwarp();  // lane 0 waits until the warp has read the stage
        if (lane == 0) ring.refill();
        ring.advance();
      }
      store_partial(partial + 2 * n * half_floats(tokens) + warp * values, sum, tokens, lane);
    }
    // All wait for the round's partial sums. The next round's lie elsewhere, and nobody is two rounds ahead.
    __syncthreads();
    if constexpr (kGateUp) {
      store_activation<Format>(p, partial, tile0, tiles, threadIdx.x);
    } else if (out.at >= 0) {
      const float value = sum_segments(partial + out.at, values) * Format::kUnscale + out.bias;
      *out.to = p.op.add ? out.old + value : value;
    }
  }
}
static_assert(2 * kRoundPairs * kTileRows * kMaxGemvRows <= kThreads);  // an output per thread
static_assert(kMaxWarpStages <= kWarpLanes);                            // a lane fills each

// ---------------------------------------------------------------- launching

template <PackedFormat kFormat, int kSteps, int kTokens, bool kGateUp>
void launch(const Params& p, uint32_t bytes, const Launch& at) {
  const auto kernel = gemv_kernel<kFormat, kSteps, kTokens, kGateUp>;
  const size_t shared_bytes = alone_on_sm(bytes, at.device);
  allow_shared_memory(kernel, shared_bytes);
  const int ctas = p.total_tiles < at.device.sm_count() ? p.total_tiles : at.device.sm_count();
  launch_dependent("gemv_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, shared_bytes, at, p);
}
template <PackedFormat kFormat, int kSteps>
void launch_for_tokens(const Params& p, uint32_t bytes, const Launch& at) {
  if (p.op.act != nullptr)
    return p.op.tokens == 1 ? launch<kFormat, kSteps, 1, true>(p, bytes, at)
                            : launch<kFormat, kSteps, kMaxGemvRows, true>(p, bytes, at);
  p.op.tokens == 1 ? launch<kFormat, kSteps, 1, false>(p, bytes, at)
                   : launch<kFormat, kSteps, kMaxGemvRows, false>(p, bytes, at);
}
// Stages of half as many K steps, where segments have no more or larger ones leave room for one only.
constexpr int kQ4FewSteps = 2;
template <PackedFormat kFormat>
void launch_for(const Params& p, int k_steps, uint32_t bytes, const Launch& at) {
  if constexpr (kFormat == PackedFormat::kQ4) {
    if (k_steps == kQ4FewSteps) return launch_for_tokens<kFormat, kQ4FewSteps>(p, bytes, at);
  }
  launch_for_tokens<kFormat, stage_k_steps(kFormat)>(p, bytes, at);
}

// A CTA has an SM for itself, and two or three stages a warp in flight are as many as memory needs: with
// 150 KB a step of Llama 8B takes 1% longer.
constexpr uint32_t kWarpRingsBytes = 115000;

struct Layout {
  uint32_t rows_bytes = 0, partial_bytes = 0, total = 0;
  int32_t stages = 0;
  int k_steps = 0;  // of a stage
};
Layout layout_of(const PackedMatrix& w, int32_t tokens, const Device& device, uint32_t bytes) {
  Layout layout;
  layout.rows_bytes = static_cast<uint32_t>(tokens) * gemv_row_stride(w.k_steps);
  layout.partial_bytes = 2 * static_cast<uint32_t>(round_floats(tokens)) * sizeof(float);
  const uint32_t fixed =
      layout.rows_bytes + layout.partial_bytes + kWarps * kMaxWarpStages * sizeof(uint64_t);
  const auto slot = [&] {
    return 2 * kWarps * static_cast<uint32_t>(layout.k_steps) * k_step_bytes(w.format);
  };
  const auto fit = [&](uint32_t limit) {
    limit = std::min(limit, device.max_shared_memory());
    return limit < fixed || !device.has_bulk_copies() ? 0u : (limit - fixed) / slot();
  };
  const bool q4 = w.format == PackedFormat::kQ4;
  layout.k_steps =
      q4 && k_steps_per_segment(w.k_steps) <= kQ4FewSteps ? kQ4FewSteps : stage_k_steps(w.format);
  uint32_t stages = fit(bytes);
  if (stages < 2 && q4) {
    layout.k_steps = kQ4FewSteps;
    stages = fit(bytes);
  }
  if (stages < 2) stages = std::min(2u, fit(kMaxBytes));  // one comes while the other is read
  layout.stages = static_cast<int32_t>(std::min<uint32_t>(stages, kMaxWarpStages));
  layout.total = fixed + static_cast<uint32_t>(layout.stages) * slot();
  return layout;
}

// What is chosen for this shape; 0: nothing is.
uint32_t tuned_ring_bytes(const Gemv& op, const Tuning& tuning) {
  if (tuning.empty() || op.num_parts == 0) return 0;
  int64_t outputs = 0;
  for (int i = 0; i < op.num_parts; ++i) outputs += op.parts[i].w.rows;
  return tuning.ring_bytes(op.parts[0].w.format, outputs, op.parts[0].w.cols, op.tokens);
}

}  // namespace

bool supports_gemv(const PackedMatrix& w, const Device& device, int32_t tokens) {
  if (!has_codes(w.format) && w.format != PackedFormat::kBf16) return false;
  return layout_of(w, tokens, device, kWarpRingsBytes).stages >= 2;
}

bool gemv_has_many_tiles(const Gemv& op, const Device& device) {
  int64_t tiles = 0;
  for (int i = 0; i < op.num_parts; ++i) tiles += op.parts[i].w.tiles_per_expert;
  return tiles >= int64_t{kManyItems} * device.sm_count() && supports_gemv(op.parts[0].w, device, op.tokens);
}

void launch_gemv(const Gemv& op, const Launch& at) {
  if (op.tokens == 0) return;
  const PackedMatrix& w = op.parts[0].w;
  Params p{op, 0, static_cast<int32_t>(w.cols), w.k_steps, 0, w.tile_bytes, 0, 0};
  const int counted = op.act != nullptr ? 1 : op.num_parts;
  for (int i = 0; i < counted; ++i) p.total_tiles += op.parts[i].w.tiles_per_expert;
  if (p.total_tiles == 0) return;
  if (prefers_gemv_tiles(op, at.device)) {
    return launch_gemv_tiles(op, op.ring_bytes > 0 ? op.ring_bytes : tuned_ring_bytes(op, at.device.tuning()),
                             at);
  }
  uint32_t bytes = op.ring_bytes > 0 ? op.ring_bytes : tuned_ring_bytes(op, at.device.tuning());
  if (bytes == 0) bytes = kWarpRingsBytes;
  const Layout layout = layout_of(w, op.tokens, at.device, bytes);
  p.stages = layout.stages;
  p.rows_bytes = layout.rows_bytes;
  p.partial_bytes = layout.partial_bytes;
  switch (w.format) {
    case PackedFormat::kBf16:
      return launch_for<PackedFormat::kBf16>(p, layout.k_steps, layout.total, at);
    case PackedFormat::kQ4:
      return launch_for<PackedFormat::kQ4>(p, layout.k_steps, layout.total, at);
    case PackedFormat::kQ5:
      return launch_for<PackedFormat::kQ5>(p, layout.k_steps, layout.total, at);
    case PackedFormat::kQ6:
      return launch_for<PackedFormat::kQ6>(p, layout.k_steps, layout.total, at);
    default:
      return launch_for<PackedFormat::kQ8>(p, layout.k_steps, layout.total, at);
  }
}

}  // namespace millrace::cuda
