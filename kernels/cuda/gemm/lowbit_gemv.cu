// GEMV with four-bit weights: one to eight rows of bf16 activations. The units of a tile of 64 rows lie one
// after the other, so a work item, a tile's segment of 4,096 columns, is one run of 140 KB.
//
// A CTA is four consumer warps, 16 rows of a tile each, and a producer thread that keeps a ring of units
// under way by bulk copies, 100 to 160 KB of an SM's three or four CTAs. Where there are enough tiles an item
// is two of them: a warp has two chains of products that do not wait for one another, and loads activations
// and waits for barriers once for both. All SMs have the same number of CTAs, which is the one that leaves
// the SM with most items the fewest: five or six would leave a thread too few registers to have a unit's
// loads under way at once. A CTA keeps its segment, and prefetches its first units to L2 while the kernel
// before still runs. The consumers load its activations once, or 2,048 columns at a time where rows are many,
// in the order in which a lane needs them, while the ring fills:
//     x   [row][unit 16 or 32][chunk 4][t 4] 16 bytes: the B operands of two steps of 16 columns
// Rows are the columns of m16n8k16 products: the chains, and so the bits, of lowbit_wgmma.cuh. Several
// segments' sums are added in order by a kernel of their own.
//
// Roofline: the units' bytes at 4.3 TB/s (measured copy of an H200), some 19 bytes a cycle of an SM. A unit
// is 4 x 150 (e2m1) to 4 x 190 (INT4) issue slots: 29 to 22 bytes a cycle. INT4 keeps the FMA pipe busy 60%
// of the time (96 operations of two bf16 a unit and warp).
#include <algorithm>

#include "kernels/cuda/gemm/lowbit_format.cuh"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/grid_sync.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/permute.cuh"

namespace millrace::cuda {
namespace {

static_assert(quant::kSegmentUnits == 1 << 5);
constexpr int kWarps = 4, kThreads = (kWarps + 1) * 32, kMaxRing = 12, kMinCtas = 3, kMaxCtas = 4;
constexpr int kZeroBytes = 256;  // a unit's activations of a row that is not there

struct GemvProblem {
  LowbitGemm op;
  int32_t row_tiles, column_units, segments;
  int32_t items, items_apart;  // of tiles; of a CTA
  int32_t ring;                // stages, of a unit of each tile of an item
  int32_t window_bits;         // 2^ so many units' activations are in shared memory
  MILLRACE_HOST_DEVICE int32_t window() const { return 1 << window_bits; }
  // Of x; neighbours in different banks.
  MILLRACE_HOST_DEVICE int32_t row_bytes() const { return window() * 256 + 64; }
};

// Words 2t, 2t + 1 of every half step of a window's columns; zeros behind the last.
__device__ void load_rows(const GemvProblem& p, int first_unit, uint8_t* to) {
  const auto* x = static_cast<const uint16_t*>(p.op.x);
  const int bits = p.window_bits + 6;  // of a row's words
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(p.op.m) << bits; i += kWarps * 32) {
    const int row = i >> bits, word = i & ((1 << bits) - 1), half_step = word % 64 / 4, t = word % 4;
    const int64_t column = (int64_t{first_unit} + word / 64) * quant::kUnitColumns + half_step * 8 + 2 * t;
    uint32_t value = 0;
    if (column < p.op.k) value = *reinterpret_cast<const uint32_t*>(x + row * p.op.ldx + column);
    uint8_t* at =
        to + row * p.row_bytes() + word / 64 * 256 + half_step / 4 * 64 + t * 16 + half_step % 4 * 4;
    *reinterpret_cast<uint32_t*>(at) = value;
  }
}

// kTiles tiles at a time, a warp 16 rows of each: two chains of products that do not wait for one another.
template <mr_lowbit_format kFormat, int kTiles>
__global__ void __launch_bounds__(kThreads, kMaxCtas) gemv_lowbit_kernel(const GemvProblem p) {
  using Weights = LowbitWeights<kFormat>;
  constexpr int kUnitBytes = quant::unit_bytes(kFormat), kStageBytes = kTiles * kUnitBytes;
  extern __shared__ __align__(128) uint8_t gemv_shared[];
  uint8_t *ring = gemv_shared, *rows = ring + p.ring * kStageBytes;
  __shared__ uint64_t full[kMaxRing], empty[kMaxRing];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.ring; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kWarps);
    }
    ptx::barrier_init_fence();
  }
  const int segment = static_cast<int>(blockIdx.x) % p.segments;
  const int first_unit = segment * quant::kSegmentUnits;
  const int units = min(quant::kSegmentUnits, p.column_units - first_unit);
  const int first_item = static_cast<int>(blockIdx.x) / p.segments;
  // Behind the last tile the last one again, whose sums nobody stores.
  const auto units_of = [&](int item, int i) {
    const int tile = min(item * kTiles + i, p.row_tiles - 1);
    return p.op.weights + (int64_t{tile} * p.column_units + first_unit) * kUnitBytes;
  };
  __syncthreads();  // the barriers are there
  ptx::let_dependents_start();
  if (warp == kWarps && lane == 0) {  // to L2 alone, where nothing that is still written stays as it was
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      ptx::prefetch_l2(units_of(first_item, i), min(units, p.ring) * kUnitBytes);
  }
  ptx::wait_for_previous();
  if (warp == kWarps) {
    uint32_t stage = 0, parity = 1;
    for (int item = first_item; lane == 0 && item < p.items; item += p.items_apart) {
      const uint8_t* from[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) from[i] = units_of(item, i);
      for (int unit = 0; unit < units; ++unit) {
        ptx::barrier_wait(empty + stage, parity);
        ptx::barrier_arrive_expect(full + stage, kStageBytes);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ptx::bulk_copy(ring + stage * kStageBytes + i * kUnitBytes, from[i], kUnitBytes, full + stage);
          from[i] += kUnitBytes;
        }
        if (++stage == static_cast<uint32_t>(p.ring)) stage = 0, parity ^= 1u;
      }
    }
    return;
  }
  const int g = lane / 4, t = lane % 4;
  const bool mine = g < p.op.m;
  // Rows that are not there: the zeros behind the last, of every unit the same.
  uint8_t* zeros = rows + static_cast<int>(p.op.m) * p.row_bytes();
  const uint8_t* x = (mine ? rows + g * p.row_bytes() : zeros) + t * 16;
  const int unit_apart = mine ? 256 : 0;
  if (threadIdx.x < kZeroBytes / 4) reinterpret_cast<uint32_t*>(zeros)[threadIdx.x] = 0;
  // Kept in registers: they are of every unit.
  uint32_t full_at = ptx::shared_address(full), empty_at = ptx::shared_address(empty);
  ptx::keep_in_register(full_at);
  ptx::keep_in_register(empty_at);
  uint32_t stage = 0, parity = 0;
  bool loaded = false;  // the only window there is
  for (int item = first_item; item < p.items; item += p.items_apart) {
    float sum[kTiles][4] = {};
    for (int first = 0; first < units; first += p.window()) {
      if (units > p.window() || !loaded) {
        ptx::named_barrier<1, kWarps * 32>();  // the consumers: nobody reads the window before
        load_rows(p, first_unit + first, rows);
        ptx::named_barrier<1, kWarps * 32>();  // the activations are there
        loaded = true;
      }
      const uint8_t* x_of_unit = x;
      for (int left = min(units - first, p.window()); left > 0; --left, x_of_unit += unit_apart) {
        ptx::barrier_wait_at(full_at + stage * 8, parity);
        const uint8_t* unit = ring + stage * kStageBytes;
        // All loads of the unit before its chain of products, which is what takes longest.
        uint32_t words[kTiles][quant::kUnitSteps];
        typename Weights::Scale scales[kTiles][quant::kUnitSteps / Weights::kSteps];
        uint4 b[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) b[c] = *reinterpret_cast<const uint4*>(x_of_unit + c * 64);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int s = 0; s < quant::kUnitSteps; ++s)
            words[i][s] = lowbit::word_at(unit + i * kUnitBytes, s, warp, lane);
#pragma unroll
          for (int s = 0; s < quant::kUnitSteps; s += Weights::kSteps)
            scales[i][s / Weights::kSteps] = Weights::scale(unit + i * kUnitBytes, s, warp, lane);
        }
#pragma unroll
        for (int s = 0; s < quant::kUnitSteps; ++s) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            uint32_t w[4];
            Weights::weights(words[i][s], scales[i][s / Weights::kSteps], w);
            ptx::mma_bf16(sum[i], w, s % 2 == 0 ? b[s / 2].x : b[s / 2].z,
                          s % 2 == 0 ? b[s / 2].y : b[s / 2].w);
          }
        }
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive_at(empty_at + stage * 8);
        if (++stage == static_cast<uint32_t>(p.ring)) stage = 0, parity ^= 1u;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int64_t output =
          (int64_t{item} * kTiles + i / 4) * quant::kUnitRows + warp * 16 + g + i % 4 / 2 * 8;
      const int row = 2 * t + i % 2;
      const float of = sum[i / 4][i % 4];
      if (row >= p.op.m || output >= p.op.n) continue;
      if (p.segments == 1) {
        store_lowbit(p.op, of * LowbitWeights<kFormat>::kUnscale, 0, row, output);
      } else {  // [segment][row][n]
        p.op.workspace[(int64_t{segment} * p.op.m + row) * p.op.n + output] = of;
      }
    }
  }
}

__global__ void __launch_bounds__(256) add_segments_kernel(const GemvProblem p, float unscale) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t all = p.op.m * p.op.n;
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < all; i += int64_t{gridDim.x} * 256) {
    float sum = p.op.workspace[i];
    for (int s = 1; s < p.segments; ++s) sum += p.op.workspace[s * all + i];
    store_lowbit(p.op, sum * unscale, 0, i / p.op.n, i % p.op.n);
  }
}

// CTAs of an SM, so many that the SM with most items has the fewest: all have the same number of CTAs, and
// CTAs the same number of items, or one less.
struct GemvPlan {
  GemvProblem p;
  int64_t tiles_of_sm = INT64_MAX;
  size_t bytes = 0;
};
GemvPlan plan_gemv(GemvProblem p, int tiles, int unit_bytes, const Device& device) {
  GemvPlan plan;
  p.items = (p.row_tiles + tiles - 1) / tiles;
  const auto m = static_cast<int>(p.op.m), stage_bytes = tiles * unit_bytes;
  constexpr int kBarrierBytes = 1024 + 2 * 8 * kMaxRing;
  const auto consider = [&](int ctas) {
    const int apart = std::max(1, device.sm_count() * ctas / p.segments);
    const int64_t tiles_of_sm = int64_t{ctas} * ((p.items + apart - 1) / apart) * tiles;
    GemvProblem with = p;
    const int room = static_cast<int>(device.max_shared_memory()) / ctas - kBarrierBytes - kZeroBytes;
    with.window_bits = m * (quant::kSegmentUnits * 256 + 64) <= room / 3 ? 5 : 4;
    with.ring = std::min((room - m * with.row_bytes()) / stage_bytes, kMaxRing);
    if (tiles_of_sm > plan.tiles_of_sm || with.ring < 3) return;
    with.items_apart = std::min(apart, p.items);
    plan.tiles_of_sm = tiles_of_sm;
    plan.p = with;
    plan.bytes =
        std::max<size_t>(static_cast<size_t>(with.ring * stage_bytes + m * with.row_bytes() + kZeroBytes),
                         device.max_shared_memory() / (ctas + 1));  // no more CTAs on an SM
  };
  for (int ctas = kMinCtas; ctas <= kMaxCtas; ++ctas) consider(ctas);
  for (int ctas = kMinCtas - 1; plan.bytes == 0 && ctas > 0; --ctas) consider(ctas);  // less shared memory
  return plan;
}

template <mr_lowbit_format kFormat>
void launch_as(const LowbitGemm& op, const Launch& at) {
  const quant::UnitGrid grid(op.n, op.k);
  GemvProblem p{};
  p.op = op;
  p.row_tiles = static_cast<int32_t>(grid.row_tiles);
  p.column_units = static_cast<int32_t>(grid.column_units);
  p.segments = (p.column_units + quant::kSegmentUnits - 1) / quant::kSegmentUnits;
  constexpr int kUnitBytes = quant::unit_bytes(kFormat);
  const GemvPlan one = plan_gemv(p, 1, kUnitBytes, at.device), two = plan_gemv(p, 2, kUnitBytes, at.device);
  // Two tiles at a time, where every SM has its CTAs all the same.
  const bool pairs = two.bytes > 0 && two.tiles_of_sm <= one.tiles_of_sm &&
                     int64_t{two.p.items} * p.segments >= int64_t{kMinCtas} * at.device.sm_count();
  const GemvPlan& plan = pairs ? two : one;
  const auto kernel = pairs ? gemv_lowbit_kernel<kFormat, 2> : gemv_lowbit_kernel<kFormat, 1>;
  allow_shared_memory(kernel, plan.bytes);
  launch_dependent("gemv_lowbit_kernel", kernel, dim3(static_cast<unsigned>(plan.p.items_apart * p.segments)),
                   kThreads, plan.bytes, at, plan.p);
  if (p.segments == 1) return;
  const int64_t blocks = (op.m * op.n + 255) / 256;
  launch_dependent("add_segments_kernel", add_segments_kernel,
                   dim3(static_cast<unsigned>(blocks < 1024 ? blocks : 1024)), 256, 0, at, p,
                   LowbitWeights<kFormat>::kUnscale);
}

}  // namespace

void launch_lowbit_gemv(const LowbitGemm& op, const Launch& at) {
  switch (op.format) {
    case MR_LOWBIT_MXFP4:
      return launch_as<MR_LOWBIT_MXFP4>(op, at);
    case MR_LOWBIT_NVFP4:
      return launch_as<MR_LOWBIT_NVFP4>(op, at);
    case MR_LOWBIT_INT4_32:
      return launch_as<MR_LOWBIT_INT4_32>(op, at);
    default:
      return launch_as<MR_LOWBIT_INT4_128>(op, at);
  }
}

}  // namespace millrace::cuda
