// GEMM on Hopper's warpgroup instructions, for every packed weight format: weights are the rows (M) of a
// product, tokens its columns (N). A consumer warp dequantizes its 16 rows of weights in registers into the
// very fragments that the tensor core takes from there; activations are bf16 in shared memory. K is cut into
// segments, as in split-K: a segment is one chain of products (tile/weight_format.cuh), and what the other
// units have to do is dequantize and, at the end of a segment, add.
//
// A CTA is persistent: two consumer warpgroups multiply 64 rows of weights each by up to 128 tokens or, where
// there is too little work for all SMs, the same 64 rows by half of the tokens each. A stage is a K step of
// 64 columns: one producer thread loads its raw weights, a box of tiles (of gate and of up: two), another its
// tokens.
//
// Roofline: 989 TFLOP/s of the tensor cores, 512 cycles per stage of 128 x 128 x 64. Dequantizing MXFP4 takes
// some 160 cycles of each scheduler's integer unit meanwhile, 8 bits some 60. All SMs' stages want 5 (MXFP4)
// to 10 (bf16) TB/s from L2 at that rate, which gives about 7.
#pragma once

#include "kernels/cuda/gemm/wgmma_epilogue.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {

// How many tokens a stage has. More widths than two would not fit the registers: the fragments of each have
// their own. A warpgroup has at least 32.
template <int kMaxWidth, int kBoxes>
__device__ inline int width_of(const GemmItem& item) {
  return item.rows <= kMaxWidth / 2 && kMaxWidth / 2 >= 32 * (3 - kBoxes) ? kMaxWidth / 2 : kMaxWidth;
}

#ifdef MILLRACE_HAS_WGMMA

// Stages are numbered through, over all items of a CTA; stage n lies at n % kCount. full completes when the
// copies of both producers have, empty when all kArrivals consumer warps have read the stage.
template <class Layout, int kArrivals = kConsumerWarps>
struct StageRing {
  static constexpr int kCount = Layout::kCount;
  uint8_t* stages;
  uint64_t *full, *empty;

  __device__ explicit StageRing(uint8_t* shared) : stages(shared) {
    full = reinterpret_cast<uint64_t*>(shared + kCount * Layout::kStageBytes);
    empty = full + kCount;
  }
  __device__ void init() const {
    for (int i = 0; i < kCount; ++i) {
      ptx::barrier_init(full + i, 2);
      ptx::barrier_init(empty + i, kArrivals);
    }
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage(uint32_t n) const { return stages + n % kCount * Layout::kStageBytes; }
  __device__ void wait_empty(uint32_t n) const { ptx::barrier_wait(empty + n % kCount, n / kCount % 2 ^ 1); }
};

// What a producer thread loads. Issuing a copy takes a thread 100 to 200 cycles: all of a stage's by one
// would take longer than its products.
enum class Operand { kWeights, kTokens };

// A producer: it waits for empty stages and fills them, over all of the CTA's work items.
template <int kMaxWidth, Operand kOperand, class Problem>
__device__ void produce(const Problem& p, const StageRing<typename Problem::Layout>& ring) {
  using Layout = typename Problem::Layout;
  constexpr int kBoxes = Problem::kBoxCount;
  uint32_t n = 0;
  const int items = p.template items<Layout::kOutputs>();
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const GemmItem item = p.template item<Layout::kOutputs>(i);
    const int width = width_of<kMaxWidth, kBoxes>(item);
    const uint8_t* rows = p.x.data + int64_t{item.first_tile} * p.k_steps * kWgmmaTileBytes;
    const int tile = p.first_tile(item);
    const auto bytes = static_cast<uint32_t>(kOperand == Operand::kWeights ? kBoxes * Layout::kBoxBytes
                                                                           : width * ptx::kSwizzleRowBytes);
    for (int k_step = 0; k_step < p.k_steps; ++k_step, ++n) {
      ring.wait_empty(n);
      uint64_t* full = ring.full + n % Layout::kCount;
      uint8_t* stage = ring.stage(n);
      ptx::barrier_arrive_expect(full, bytes);
      if constexpr (kOperand == Operand::kWeights) {
        for (int copy = 0; copy < Problem::kWeightCopies; ++copy) {
          ptx::tma_load_2d(stage + Layout::kRawAt + copy * Layout::kBoxBytes, p.map(item, copy),
                           k_step * Problem::Format::kKStepBytes, tile, full);
        }
      } else if (width > kWgmmaRows) {
        ptx::tma_load_3d(stage, &p.rows_map, k_step * (kWgmmaTileBytes / 1024), item.first_tile, full);
      } else {
        ptx::bulk_copy_kept(stage, rows + k_step * kWgmmaTileBytes, bytes, full);
      }
    }
  }
}

// A lane's A fragments of a K step: four products of 16 columns.
struct Fragments {
  uint32_t a[4][4];

  template <class Format>
  __device__ void dequantize(const uint8_t* low_tile, const uint8_t* high_tile, int lane) {
    uint32_t low[4][2], high[4][2];
    Format::load(low_tile, lane, low);
    Format::load(high_tile, lane, high);
#pragma unroll
    for (int s = 0; s < 4; ++s)
      a[s][0] = low[s][0], a[s][1] = high[s][0], a[s][2] = low[s][1], a[s][3] = high[s][1];
  }
};

// Where a consumer warp is in a ring of stages with barriers [full][empty]. Stages are counted on, not
// divided out, and addresses are the warp's, not a lane's: a warp's next product is accepted when its last
// one is under way, so what stands between the last product of a stage and the first of the next is time in
// which the tensor cores run dry.
template <int kCount, int kStageBytes>
struct RingCursor {
  const uint8_t* stages;
  uint32_t data, barriers;  // addresses in shared memory
  uint32_t stage = 0, parity = 0;

  __device__ RingCursor(const uint8_t* first, const uint64_t* full)
      : stages(first),
        data(ptx::warp_uniform(ptx::shared_address(first))),
        barriers(ptx::warp_uniform(ptx::shared_address(full))) {}
  __device__ const uint8_t* bytes() const { return stages + stage * kStageBytes; }
  // An operand so many bytes into the stage.
  __device__ uint64_t operand(uint32_t offset) const {
    return ptx::wgmma_operand_at(data + offset) + stage * (kStageBytes / 16u);
  }
  __device__ void wait() const { ptx::barrier_wait_at(barriers + 8 * stage, parity); }
  __device__ void advance() {
    if (++stage == kCount) stage = 0, parity ^= 1u;
  }
  // The warp has read it.
  __device__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_at(barriers + 8 * (kCount + stage));
  }
  __device__ void release_previous(int lane) const { previous().release(lane); }
  __device__ RingCursor previous() const {  // to be released: its parity is not meant
    RingCursor before = *this;
    before.stage = stage == 0 ? kCount - 1u : stage - 1;
    return before;
  }
};
template <class Layout>
using StageCursor = RingCursor<Layout::kCount, Layout::kStageBytes>;

// A consumer warp's part of one work item: 16 rows of weights by kTokens tokens.
template <int kTokens, class Problem>
struct Mainloop {
  using Layout = typename Problem::Layout;
  const Problem& p;
  StageCursor<Layout>& at;
  const int warp, lane;
  const int warpgroup;         // the warp's, of the consumers
  const uint32_t first_token;  // of the stage's
  float acc[kTokens / 2];      // of a segment

  // A stage's weights, dequantized while products of the stage before are under way.
  __device__ void load(Fragments& f) const {
    using Format = typename Problem::Format;
    const uint8_t* raw = at.bytes() + Layout::kRawAt;
    f.template dequantize<Format>(raw + Problem::raw_tile(warp, 0) * Format::kKStepBytes,
                                  raw + Problem::raw_tile(warp, 1) * Format::kKStepBytes, lane);
  }
  // Products kFirst to kLast - 1 of the stage's four, left under way.
  template <int kFirst, int kLast>
  __device__ void multiply(const Fragments& f, bool first) {
    const uint64_t b = at.operand(first_token * ptx::kSwizzleRowBytes);
    const uint64_t a = at.operand(Layout::kRawAt +
                                  static_cast<uint32_t>(warpgroup % Problem::kBoxCount * Layout::kBoxBytes));
    if (kFirst == 0) ptx::wgmma_fence();
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      if constexpr (Problem::kWeightsInShared) {
        ptx::wgmma_bf16(acc, a + 2 * i, b + 2 * i, !first || i > 0);
      } else {
        ptx::wgmma_bf16(acc, f.a[i], b + 2 * i, !first || i > 0);
      }
    }
    ptx::wgmma_commit();
  }
  // The products of a segment are done: its stage is released, its sum added.
  __device__ void end_segment(const StageCursor<Layout>& last, float (&total)[kTokens / 2]) {
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    last.release(lane);
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] += acc[j];
  }

  // Weights that are operands as they lie: under a stage's first two products the stage before is released,
  // under the others the next is waited for.
  __device__ void run_shared(float (&total)[kTokens / 2], int segment_k_steps) {
    int done = 0;          // K steps of the segment
    int left = p.k_steps;  // of the item
    const auto step = [&] {
      const Fragments none{};
      multiply<0, 2>(none, done == 0);
      if (done > 0) {
        ptx::wgmma_wait<1>();
        at.release_previous(lane);
      }
      StageCursor<Layout> next = at;
      next.advance();
      --left;
      multiply<2, 4>(none, false);
      if (left > 0) next.wait();
      if (++done == segment_k_steps || left == 0) {
        done = 0;
        end_segment(at, total);
      }
      at = next;
    };
    at.wait();
    while (true) {  // by twos: or the assembler waits for products between two stages
      step();
      if (left == 0) break;
      step();
      if (left == 0) break;
    }
  }
  // Weights that are dequantized: under the four products of the stage before.
  __device__ void run_dequantized(float (&total)[kTokens / 2], int segment_k_steps) {
    int done = 0;
    const auto step = [&](Fragments& f) {
      at.wait();
      load(f);
      if (done == segment_k_steps) {
        end_segment(at.previous(), total);
        done = 0;
      }
      multiply<0, 4>(f, done == 0);
      if (done > 0) {
        ptx::wgmma_wait<1>();
        at.release_previous(lane);
      }
      ++done;
      at.advance();
    };
    Fragments even, odd;
    int k_step = 0;
    for (; k_step + 1 < p.k_steps; k_step += 2) {
      step(even);
      step(odd);
    }
    if (k_step < p.k_steps) step(even);
    end_segment(at.previous(), total);
  }

  __device__ void run(const GemmItem& item) {
    const int segment_k_steps = k_steps_per_segment(p.k_steps);
    float total[kTokens / 2];
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] = 0.0f;
    if constexpr (Problem::kWeightsInShared) {
      run_shared(total, segment_k_steps);
    } else {
      run_dequantized(total, segment_k_steps);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] *= Problem::Format::kUnscale;
    p.template epilogue<kTokens>(item, warp, lane / 4, lane % 4, static_cast<int>(first_token), total);
  }
};

// The consumers, all warps of two warpgroups: the CTA's work items, one after the other.
template <int kMaxWidth, class Problem>
__device__ void consume(const Problem& p, const StageRing<typename Problem::Layout>& ring) {
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / kWarpLanes)),
            lane = threadIdx.x % kWarpLanes;
  constexpr int kBoxes = Problem::kBoxCount, kOutputs = Problem::Layout::kOutputs;
  constexpr int kWidth = kMaxWidth / (3 - kBoxes), kHalfWidth = kWidth / 2 < 32 ? 32 : kWidth / 2;
  const int warpgroup = warp / ptx::kWarpgroupWarps;
  const auto token_part = static_cast<uint32_t>(kBoxes == 1 ? warpgroup : 0);  // of the tokens
  StageCursor<typename Problem::Layout> at(ring.stages, ring.full);
  const int items = p.template items<kOutputs>();
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const GemmItem item = p.template item<kOutputs>(i);
    if (kHalfWidth == kWidth || width_of<kMaxWidth, kBoxes>(item) == kMaxWidth) {
      Mainloop<kWidth, Problem>{p, at, warp, lane, warpgroup, token_part * kWidth, {}}.run(item);
    } else {
      Mainloop<kHalfWidth, Problem>{p, at, warp, lane, warpgroup, token_part * kHalfWidth, {}}.run(item);
    }
  }
}

#endif  // MILLRACE_HAS_WGMMA

template <int kMaxWidth, class Problem>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm_wgmma_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const StageRing<typename Problem::Layout> ring(shared);
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncthreads();  // everybody: the barriers are there
  ptx::wait_for_previous();
  if (threadIdx.x / kWarpLanes < kConsumerWarps) {
    ptx::more_registers<kConsumerRegisters>();
    consume<kMaxWidth>(p, ring);
  } else {
    ptx::fewer_registers<kProducerRegisters>();
    const int thread = threadIdx.x % ptx::kWarpgroupThreads;
    if (thread == 0) produce<kMaxWidth, Operand::kWeights>(p, ring);
    if (thread == kWarpLanes) produce<kMaxWidth, Operand::kTokens>(p, ring);
  }
#else
  __trap();
#endif
}

}  // namespace millrace::cuda
