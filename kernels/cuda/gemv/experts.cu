// The expert layer of one to four tokens, in two kernels: gate and up with the activation, then down with the
// weighted sum. Each token has its own experts (blockIdx.y). One algorithm for all formats; how a format's
// tiles are multiplied, and how many are under way, is ExpertFormat's (experts.cuh).
//
// A CTA is sixteen warps, one per split-K segment. Activations lie in shared memory as plain bf16 rows; each
// of a product's eight columns reads one, the same again and again, since there is one token only.
//
// Roofline: the chosen tiles' bytes at B = 4.3 TB/s. gpt-oss-20b, one token: 35.3 MB and 17.6 MB of MXFP4
// tiles per layer, 8.2 and 4.1 us; 7 us of issue slots for both kernels. Gate and up cannot begin before the
// router has spoken; down can: its first stages are under way while gate and up still compute.
#include "kernels/cuda/gemv/experts.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWarps = kSplitK;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kProducerThread = kThreads - kWarpLanes;  // of the warp whose segment is the shortest

struct ExpertParams {
  GemvExperts op;
  GemvLayout layout;
};

// Rows of bf16 activations on their way to shared memory, one copy; the columns of a missing last block are
// zeros. Everybody calls zero_padding before the barrier that shows everybody `full`.
struct SharedRows {
  uint8_t* rows;
  int cols, k_steps;
  __device__ uint32_t stride() const { return static_cast<uint32_t>(k_steps) * kKStepColumns * 2; }
  __device__ void zero_padding(int count) const {
    const int padding = k_steps * kKStepColumns - cols;
    for (int i = threadIdx.x; i < count * padding; i += kThreads) {
      reinterpret_cast<uint16_t*>(rows + i / padding * stride())[cols + i % padding] = 0;
    }
  }
  __device__ void load(const uint16_t* from, int count, uint64_t* full) const {  // one thread
    const auto bytes = static_cast<uint32_t>(cols) * 2u;
    ptx::barrier_arrive_expect(full, static_cast<uint32_t>(count) * bytes);
    for (int i = 0; i < count; ++i)
      ptx::bulk_copy_kept(rows + i * stride(), from + int64_t{i} * cols, bytes, full);
  }
};

// ---------------------------------------------------------------- gate and up

// One of a work item's sums, [gate, up][8]; loaded before its tiles are multiplied, so that the bias is
// there.
struct HalfOutput {
  int slot = -1;  // -1: this thread has none
  int64_t row = 0;
  float bias = 0.0f;
};
__device__ inline HalfOutput load_half_output(const GemvExperts& op, const TopK& chosen, int first,
                                              int count) {
  HalfOutput out;
  const int n = static_cast<int>(threadIdx.x) / kItemRows, value = threadIdx.x % kItemRows;
  if (n >= count) return out;
  const int slot = (first + n) / op.gate.tiles_per_expert, tile = (first + n) % op.gate.tiles_per_expert;
  out.row = int64_t{tile} * kTileRows + value % kTileRows;
  if (out.row >= op.gate.rows) return out;
  out.slot = slot;
  const float* bias = value < kTileRows ? op.gate_bias : op.up_bias;
  if (bias != nullptr) out.bias = __ldg(bias + chosen.expert[slot] * op.gate.rows + out.row);
  return out;
}

// A work item is a slot's tile of 8 gate rows with the same 8 up rows. partial [item][segment][gate, up][8].
template <PackedFormat kFormat, int kKSteps>
__global__ void __launch_bounds__(kThreads, ExpertFormat<kFormat>::kMinCtas)
    gemv_gate_up_kernel(const __grid_constant__ ExpertParams p) {
  using Format = ExpertFormat<kFormat>;
  constexpr int kRound = Format::kGateUpRound;
  static_assert(kRound * kItemRows <= kThreads);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ TopK chosen;
  __shared__ uint64_t rows_full;
  const GemvExperts& op = p.op;
  Ring ring = p.layout.ring(shared, kSplitK);
  float* partial = p.layout.partial(shared);
  const SharedRows x{p.layout.rows(shared), static_cast<int>(op.gate.cols), op.gate.k_steps};
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int total = op.k * op.gate.tiles_per_expert;
  const int first = static_cast<int>(int64_t{blockIdx.x} * total / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * total / gridDim.x);
  Producer producer(ring, last - first, [&](const Ring& stage, int i) {
    const int u = first + i, tile = u % op.gate.tiles_per_expert;
    const int expert = chosen.expert[u / op.gate.tiles_per_expert];
    stage.acquire(2 * op.gate.tile_bytes);
    stage.copy(0, expert_tile(op.gate, expert, tile), op.gate.tile_bytes);
    stage.copy(op.gate.tile_bytes, expert_tile(op.up, expert, tile), op.gate.tile_bytes);
  });
  if (threadIdx.x == kProducerThread) {
    ptx::barrier_init(&rows_full, 1);
    ring.init();
  }
  x.zero_padding(1);
  ptx::wait_for_previous();
  ptx::let_dependents_start();  // after the wait: the next kernel reads the scores before its own
  if (warp == kWarps - 1) {
    if (lane == 0) x.load(op.x_bf16 + int64_t{blockIdx.y} * op.gate.cols, 1, &rows_full);
    route(op, lane, chosen);
    __syncwarp();  // the warp waits for lane 0's choice
    producer.fill_by_warp(lane);
  }
  __syncthreads();  // all wait for the choice, the barriers and the padding
  const WarpSegment segment(op.gate.k_steps, warp);
  ptx::barrier_wait(&rows_full, 0);
  for (int u0 = first; u0 < last; u0 += kRound) {
    const int count = min(kRound, last - u0);
    const HalfOutput out = load_half_output(op, chosen, u0, count);
    for (int n = 0; n < count; ++n, ring.advance()) {
      const uint8_t* stage = ring.wait_full();
      float sum[4] = {};
      Format::template multiply<kKSteps>(stage, stage + op.gate.tile_bytes, x.rows, segment, lane, sum);
      ring.release(lane);
      if (threadIdx.x == kProducerThread) producer.refill(u0 - first + n);
      __syncwarp();  // nobody of the producer's warp spins for an item that has yet to be loaded
      if (lane % 4 == 0) {
        float* to = partial + (n * kSplitK + warp) * kItemRows + lane / 4;
        to[0] = sum[0] * TileFormat<kFormat>::kUnscale;
        to[kTileRows] = sum[2] * TileFormat<kFormat>::kUnscale;
      }
    }
    __syncthreads();  // all wait for the round's partial sums
    const int value = threadIdx.x % kItemRows;
    float half = 0.0f;
    if (out.slot >= 0) {
      half =
          add_segments(partial + threadIdx.x / kItemRows * kSplitK * kItemRows + value, kItemRows) + out.bias;
    }
    const float up = __shfl_down_sync(kAllLanes, half, kTileRows);
    if (out.slot >= 0 && value < kTileRows)
      store_act(op, out.slot, out.row, activate(op.activation, half, up));
    if (u0 + kRound < last) __syncthreads();  // nobody writes the next round's before these are read
  }
}

// ---------------------------------------------------------------- down

// A work item is one tile of 8 rows of two slots: rows 0-7 of the product are the first's, 8-15 the second's,
// and so are the even and the odd columns. A round is some tiles: first all of slots 0 and 1, then of 2
// and 3.
template <PackedFormat kFormat, int kKSteps>
__global__ void __launch_bounds__(kThreads, ExpertFormat<kFormat>::kMinCtas)
    gemv_down_kernel(const __grid_constant__ ExpertParams p) {
  using Format = ExpertFormat<kFormat>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ TopK chosen;
  __shared__ uint64_t rows_full;
  const GemvExperts& op = p.op;
  Ring ring = p.layout.ring(shared, kSplitK);
  float* partial = p.layout.partial(shared);  // [slot][tile][segment][8]
  const SharedRows x{p.layout.rows(shared), static_cast<int>(op.down.cols), op.down.k_steps};
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int total = op.down.tiles_per_expert, k = op.k, twos = (k + 1) / 2;
  const int first = static_cast<int>(int64_t{blockIdx.x} * total / gridDim.x);
  const int last = static_cast<int>(int64_t{blockIdx.x + 1} * total / gridDim.x);
  Producer producer(ring, (last - first) * twos, [&](const Ring& stage, int i) {
    const int u0 = first + i / (kDownTiles * twos) * kDownTiles, in_round = i % (kDownTiles * twos);
    const int count = min(kDownTiles, last - u0), slot = in_round / count * 2, tile = u0 + in_round % count;
    const bool both = slot + 1 < k;
    stage.acquire((both ? 2u : 1u) * op.down.tile_bytes);
    stage.copy(0, expert_tile(op.down, chosen.expert[slot], tile), op.down.tile_bytes);
    if (both)
      stage.copy(op.down.tile_bytes, expert_tile(op.down, chosen.expert[slot + 1], tile), op.down.tile_bytes);
  });
  if (threadIdx.x == kProducerThread) {
    ptx::barrier_init(&rows_full, 1);
    ring.init();
  }
  ptx::let_dependents_start();
  if (warp == kWarps - 1) {
    route(op, lane, chosen);  // the scores are older than the kernel before: see gemv_gate_up_kernel
    __syncwarp();             // the warp waits for lane 0's choice
    producer.fill_by_warp(lane);
  }
  x.zero_padding(k);
  __syncthreads();  // all wait for the choice, the barriers and the padding
  ptx::wait_for_previous();
  if (threadIdx.x == kProducerThread) {
    x.load(reinterpret_cast<const uint16_t*>(op.act) + int64_t{blockIdx.y} * k * op.down.cols, k, &rows_full);
  }
  const WarpSegment segment(op.down.k_steps, warp);
  const int column = activation_row<kFormat>(lane);
  constexpr int kStride = kDownTiles * kSplitK * kTileRows;
  bool rows_there = false;
  for (int u0 = first; u0 < last; u0 += kDownTiles) {
    const int count = min(kDownTiles, last - u0);
    const DownOutput out = load_down_output(op, chosen, u0 + min(warp, count - 1), lane);
    if (!rows_there) ptx::barrier_wait(&rows_full, 0);
    rows_there = true;
    for (int i = 0; i < twos * count; ++i, ring.advance()) {
      const int slot = i / count * 2, n = i % count;
      const bool both = slot + 1 < k;
      const uint8_t* stage = ring.wait_full();
      const uint8_t* row = x.rows + (slot + (both ? column % 2 : 0)) * x.stride();
      float sum[4] = {};
      Format::template multiply<kKSteps>(stage, stage + (both ? op.down.tile_bytes : 0), row, segment, lane,
                                         sum);
      ring.release(lane);
      if (threadIdx.x == kProducerThread) producer.refill((u0 - first) * twos + i);
      __syncwarp();  // nobody of the producer's warp spins for an item that has yet to be loaded
      if (lane % 4 == 0) {
        float* to = partial + slot * kStride + (n * kSplitK + warp) * kTileRows + lane / 4;
        to[0] = sum[0] * TileFormat<kFormat>::kUnscale;
        if (both) to[kStride] = sum[3] * TileFormat<kFormat>::kUnscale;
      }
    }
    __syncthreads();  // all wait for the round's partial sums
    if (warp < count) {
      store_down_output(op, chosen, out, partial + warp * kSplitK * kTileRows, kStride, u0 + warp, lane);
    }
    if (u0 + kDownTiles < last) __syncthreads();  // nobody writes the next round's before these are read
  }
}
static_assert(kDownTiles <= kWarps);  // a warp per tile adds it up

// ---------------------------------------------------------------- launching

// f(std::integral_constant) of the format.
template <class F>
auto with_format(PackedFormat format, F&& f) {
  switch (format) {
    case PackedFormat::kMxfp4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kMxfp4>());
    case PackedFormat::kBf16:
      return f(std::integral_constant<PackedFormat, PackedFormat::kBf16>());
    case PackedFormat::kQ4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kQ4>());
    case PackedFormat::kQ5:
      return f(std::integral_constant<PackedFormat, PackedFormat::kQ5>());
    case PackedFormat::kQ6:
      return f(std::integral_constant<PackedFormat, PackedFormat::kQ6>());
    default:
      return f(std::integral_constant<PackedFormat, PackedFormat::kQ8>());
  }
}
// f(std::integral_constant) of the K steps of a whole segment, as far as the format has a kernel for each
// number of them.
template <PackedFormat kFormat, class F>
void with_k_steps(int k_steps, F&& f) {
  if constexpr (ExpertFormat<kFormat>::kMaxKSteps == 0) {
    f(std::integral_constant<int, 0>());
  } else {
    static_assert(ExpertFormat<kFormat>::kMaxKSteps == 4);
    if (k_steps == 1) return f(std::integral_constant<int, 1>());
    if (k_steps == 2) return f(std::integral_constant<int, 2>());
    if (k_steps == 3) return f(std::integral_constant<int, 3>());
    f(std::integral_constant<int, 4>());
  }
}

GemvLayout gate_up_layout(const GemvExperts& op, const Device& device) {
  const int64_t items = int64_t{op.k} * op.gate.tiles_per_expert, ctas = device.sm_count();
  return with_format(op.gate.format, [&](auto format) {
    using Format = ExpertFormat<decltype(format)::value>;
    constexpr uint32_t kPartial = Format::kGateUpRound * kSplitK * kItemRows * sizeof(float);
    return gemv_layout(2 * op.gate.tile_bytes, items / ctas + 2, row_bytes(op.gate), kPartial, device,
                       Format::kGateUpRingBytes);
  });
}
GemvLayout down_layout(const GemvExperts& op, const Device& device) {
  const auto slots = static_cast<uint32_t>(op.k);
  const int64_t ctas = device.sm_count(), tiles = (op.down.tiles_per_expert + ctas - 1) / ctas;
  return gemv_layout(2 * op.down.tile_bytes, tiles * ((op.k + 1) / 2) + 1, slots * row_bytes(op.down),
                     slots * kDownTiles * kSplitK * kTileRows * sizeof(float), device);
}

template <class Kernel>
void launch(const char* name, Kernel* kernel, int64_t items, const ExpertParams& p, const Launch& at) {
  // Several tokens' CTAs share SMs.
  const size_t bytes = p.op.tokens == 1 ? alone_on_sm(p.layout.total(), at.device) : p.layout.total();
  allow_shared_memory(kernel, alone_on_sm(bytes, at.device));
  const int64_t ctas = items < at.device.sm_count() ? items : at.device.sm_count();
  launch_dependent(name, kernel, dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(p.op.tokens)),
                   kThreads, bytes, at, p);
}

template <PackedFormat kFormat>
void launch_gate_up(const GemvExperts& op, const Launch& at) {
  with_k_steps<kFormat>(k_steps_per_segment(op.gate.k_steps), [&](auto k_steps) {
    launch("gemv_gate_up_kernel", gemv_gate_up_kernel<kFormat, decltype(k_steps)::value>,
           int64_t{op.k} * op.gate.tiles_per_expert, {op, gate_up_layout(op, at.device)}, at);
  });
}
template <PackedFormat kFormat>
void launch_down(const GemvExperts& op, const Launch& at) {
  with_k_steps<kFormat>(k_steps_per_segment(op.down.k_steps), [&](auto k_steps) {
    launch("gemv_down_kernel", gemv_down_kernel<kFormat, decltype(k_steps)::value>, op.down.tiles_per_expert,
           {op, down_layout(op, at.device)}, at);
  });
}

}  // namespace

bool supports_gemv_experts(const GemvExperts& op, const Device& device) {
  if (op.gate.format == PackedFormat::kNone || op.gate.format != op.up.format || op.k > kMaxTopK)
    return false;
  if (op.down.format == PackedFormat::kNone) return false;
  if (k_steps_per_segment(op.gate.k_steps) > 4 || k_steps_per_segment(op.down.k_steps) > 4) return false;
  return gate_up_layout(op, device).stages >= 2 && down_layout(op, device).stages >= 2;
}

void launch_gemv_experts(const GemvExperts& op, const Launch& at) {
  if (op.tokens == 0) return;
  with_format(op.gate.format, [&](auto format) { launch_gate_up<decltype(format)::value>(op, at); });
  with_format(op.down.format, [&](auto format) { launch_down<decltype(format)::value>(op, at); });
}

}  // namespace millrace::cuda
