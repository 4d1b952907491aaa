// GEMV with four-bit weights: one to eight rows of bf16 activations. The units of a tile of 64 rows lie one
// after the other, so a work item, a tile's segment of 4,096 columns, is one run of 140 KB.
//
// A CTA is four consumer warps, 16 rows each, and a producer thread that keeps a ring of units under way by
// bulk copies, 100 to 160 KB of an SM's three or four CTAs. All SMs have the same number of CTAs, which is
// the one that leaves the SM with most items the fewest: five or six would leave a thread too few registers
// to have a unit's loads under way at once. A CTA keeps its segment, and prefetches its first units to L2
// while the kernel before still runs. The consumers load its activations once, or 2,048 columns at a time
// where rows are many, in the order in which a lane needs them, while the ring fills:
//     x   [row][unit 16 or 32][chunk 4][t 4] 16 bytes: the B operands of two steps of 16 columns
// Rows are the columns of m16n8k16 products: the chains, and so the bits, of lowbit_wgmma.cuh. Several
// segments' sums are added in order by a kernel of their own.
//
// Roofline: the units' bytes at 4.3 TB/s (measured copy of an H200), some 19 bytes a cycle of an SM. A unit
// is 4 x 150 (e2m1) to 4 x 210 (INT4) issue slots: 29 to 20 bytes a cycle.
#include <algorithm>

#include "kernels/cuda/gemm/lowbit_format.cuh"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/grid_sync.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"

namespace millrace::cuda {
namespace {

static_assert(quant::kSegmentUnits == 1 << 5);
constexpr int kWarps = 4, kThreads = (kWarps + 1) * 32, kMaxRing = 12, kMinCtas = 3, kMaxCtas = 4;
constexpr int kZeroBytes = 256;  // a unit's activations of a row that is not there

struct GemvProblem {
  LowbitGemm op;
  int32_t row_tiles, column_units, segments;
  int32_t tiles_apart;  // of a CTA's items
  int32_t ring;         // units
  int32_t window_bits;  // 2^ so many units' activations are in shared memory
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

template <mr_lowbit_format kFormat>
__global__ void __launch_bounds__(kThreads, kMaxCtas) gemv_lowbit_kernel(const GemvProblem p) {
  using Weights = LowbitWeights<kFormat>;
  constexpr int kUnitBytes = quant::unit_bytes(kFormat);
  extern __shared__ __align__(128) uint8_t gemv_shared[];
  uint8_t *ring = gemv_shared, *rows = ring + p.ring * kUnitBytes;
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
  __syncthreads();  // the barriers are there
  ptx::let_dependents_start();
  if (warp == kWarps && lane == 0) {  // to L2 alone, where nothing that is still written stays as it was
    const int tile = static_cast<int>(blockIdx.x) / p.segments;
    const uint8_t* from = p.op.weights + (int64_t{tile} * p.column_units + first_unit) * kUnitBytes;
    ptx::prefetch_l2(from, min(units, p.ring) * kUnitBytes);
  }
  ptx::wait_for_previous();
  if (warp == kWarps) {
    uint32_t stage = 0, parity = 1;
    for (int tile = static_cast<int>(blockIdx.x) / p.segments; lane == 0 && tile < p.row_tiles;
         tile += p.tiles_apart) {
      const uint8_t* from = p.op.weights + (int64_t{tile} * p.column_units + first_unit) * kUnitBytes;
      for (int i = 0; i < units; ++i) {
        ptx::barrier_wait(empty + stage, parity);
        ptx::barrier_arrive_expect(full + stage, kUnitBytes);
        ptx::bulk_copy(ring + stage * kUnitBytes, from + int64_t{i} * kUnitBytes, kUnitBytes, full + stage);
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
  uint32_t stage = 0, parity = 0;
  bool loaded = false;  // the only window there is
  for (int tile = static_cast<int>(blockIdx.x) / p.segments; tile < p.row_tiles; tile += p.tiles_apart) {
    float sum[4] = {};
    for (int i = 0; i < units; ++i) {
      if ((i & (p.window() - 1)) == 0 && (units > p.window() || !loaded)) {
        ptx::named_barrier<1, kWarps * 32>();  // the consumers: nobody reads the window before
        load_rows(p, first_unit + i, rows);
        ptx::named_barrier<1, kWarps * 32>();  // the activations are there
        loaded = true;
      }
      ptx::barrier_wait(full + stage, parity);
      const uint8_t* unit = ring + stage * kUnitBytes;
      // All loads of the unit before its chain of products, which is what takes longest.
      uint32_t words[quant::kUnitSteps];
      typename Weights::Scale scales[quant::kUnitSteps / Weights::kSteps];
      uint4 b[4];
#pragma unroll
      for (int s = 0; s < quant::kUnitSteps; ++s) words[s] = lowbit::word_at(unit, s, warp, lane);
#pragma unroll
      for (int s = 0; s < quant::kUnitSteps; s += Weights::kSteps)
        scales[s / Weights::kSteps] = Weights::scale(unit, s, warp, lane);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        b[c] = *reinterpret_cast<const uint4*>(x + (i & (p.window() - 1)) * unit_apart + c * 64);
      }
#pragma unroll
      for (int s = 0; s < quant::kUnitSteps; ++s) {
        uint32_t w[4];
        Weights::weights(words[s], scales[s / Weights::kSteps], w);
        ptx::mma_bf16(sum, w, s % 2 == 0 ? b[s / 2].x : b[s / 2].z, s % 2 == 0 ? b[s / 2].y : b[s / 2].w);
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(empty + stage);
      if (++stage == static_cast<uint32_t>(p.ring)) stage = 0, parity ^= 1u;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t output = int64_t{tile} * quant::kUnitRows + warp * 16 + g + i / 2 * 8;
      const int row = 2 * t + i % 2;
      if (row >= p.op.m || output >= p.op.n) continue;
      if (p.segments == 1) {
        store_lowbit(p.op, sum[i] * LowbitWeights<kFormat>::kUnscale, 0, row, output);
      } else {  // [segment][row][n]
        p.op.workspace[(int64_t{segment} * p.op.m + row) * p.op.n + output] = sum[i];
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

template <mr_lowbit_format kFormat>
void launch_as(const LowbitGemm& op, const Launch& at) {
  const quant::UnitGrid grid(op.n, op.k);
  GemvProblem p{};
  p.op = op;
  p.row_tiles = static_cast<int32_t>(grid.row_tiles);
  p.column_units = static_cast<int32_t>(grid.column_units);
  p.segments = (p.column_units + quant::kSegmentUnits - 1) / quant::kSegmentUnits;
  // CTAs of an SM, so many that the SM with most items has the fewest: all have the same number of CTAs, and
  // CTAs the same number of items, or one less.
  const int sms = at.device.sm_count();
  constexpr int kUnitBytes = quant::unit_bytes(kFormat), kBarrierBytes = 1024 + 2 * 8 * kMaxRing;
  int64_t least = INT64_MAX;
  size_t bytes = 0;
  const auto consider = [&](int ctas) {
    const int apart = sms * ctas / p.segments < 1 ? 1 : sms * ctas / p.segments;
    const int64_t items = int64_t{ctas} * ((p.row_tiles + apart - 1) / apart);
    GemvProblem with = p;
    const int room = static_cast<int>(at.device.max_shared_memory()) / ctas - kBarrierBytes - kZeroBytes;
    with.window_bits = op.m * (quant::kSegmentUnits * 256 + 64) <= room / 3 ? 5 : 4;
    with.ring = std::min((room - static_cast<int>(op.m) * with.row_bytes()) / kUnitBytes, kMaxRing);
    if (items > least || with.ring < 3) return;
    least = items;
    p = with;
    p.tiles_apart = std::min(apart, p.row_tiles);
    bytes = std::max<size_t>(p.ring * kUnitBytes + static_cast<size_t>(op.m) * p.row_bytes() + kZeroBytes,
                             at.device.max_shared_memory() / (ctas + 1));  // no more CTAs on an SM
  };
  for (int ctas = kMinCtas; ctas <= kMaxCtas; ++ctas) consider(ctas);
  for (int ctas = kMinCtas - 1; bytes == 0 && ctas > 0; --ctas) consider(ctas);  // less shared memory
  allow_shared_memory(gemv_lowbit_kernel<kFormat>, bytes);
  launch_dependent("gemv_lowbit_kernel", gemv_lowbit_kernel<kFormat>,
                   dim3(static_cast<unsigned>(p.tiles_apart * p.segments)), kThreads, bytes, at, p);
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
