// GEMM of four-bit weights on Hopper's warpgroup instructions: weights are the rows (M) of a product, tokens
// its columns (N). A consumer warp makes bf16 fragments of its weights in registers, from where the tensor
// core takes operand A; activations lie in shared memory as they come from memory. For the gradient of the
// rows the same units are read, and fragments are transposed between lanes.
//
// A CTA is persistent: two consumer warpgroups of 64 outputs each by up to 256 tokens, and two producer
// threads. A stage is 128 of the reduced dimension:
//     tokens   [2][tokens][64] bf16, 128-byte swizzle: boxes of a map
//     weights  two units: forward, the two warpgroups' rows; backward, the stage's two halves
//
//     consumer   wgmma half i      ###################
//                fragments i + 1      ===========           (the other set of registers)
//
// Roofline: a stage of 128 x 256 x 128 is 2,048 cycles of the tensor cores, in which 74 KB come from L2, 36
// bytes a cycle. Making fragments takes 16 x 12 to 16 x 20 issue slots a warp, two warps a scheduler: a
// fifth to a third of them.
//
// Sums are cut every 4,096 of the reduced dimension (quant::kSegmentUnits), so that a row has the bits that
// the GEMV gives it: the totals so far wait in memory, 128 KB a CTA. That costs: cut every 2,048, 8,192 x
// 8,192 x 8,192 of MXFP4 ran at 618 TFLOP/s on an H200, not cut at all at 733.
#pragma once

#include "kernels/cuda/gemm/dense_launch.cuh"
#include "kernels/cuda/gemm/group_schedule.cuh"
#include "kernels/cuda/gemm/lowbit.h"
#include "kernels/cuda/gemm/lowbit_format.cuh"
#include "millrace/kernels/tile/ptx/bulk_reduce.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/wgmma_16bit.cuh"

namespace millrace::cuda {

inline constexpr int kLowbitWarps = 8, kLowbitThreads = 384, kLowbitOutputs = 128;
inline constexpr int kLowbitPanelBytes = 2304;  // of a warpgroup: 16 tokens x 144 bytes or 8 x 272
inline constexpr int kLowbitMaxTokens = 256;

template <mr_lowbit_format kFormat, int kMaxTokens>
struct LowbitStages {
  static constexpr int kTokenBytes = kMaxTokens * 256;
  static constexpr int kUnitBytes = quant::unit_bytes(kFormat), kRawBytes = 2 * kUnitBytes;
  static constexpr int kOther = 2 * kLowbitPanelBytes + 256;
  static constexpr int kFits = (kDenseSharedBytes - kOther) / (kTokenBytes + kRawBytes);
  static constexpr int kCount = kFits < 8 ? kFits : 8;
  static constexpr int kBytes = kCount * (kTokenBytes + kRawBytes) + kOther;
  static constexpr int kBoxRows = kMaxTokens < 128 ? kMaxTokens : 128;
  static_assert(kCount >= 3 && kRawBytes % 128 == 0);
};

struct LowbitProblem {
  CUtensorMap x;  // boxes of 64 columns x kBoxRows
  const uint8_t* weights;
  const float *expert_scales, *bias;
  const int32_t* offsets;
  void* y;
  float* totals;  // [CTAs][2][kLowbitMaxTokens / 8][128 threads][4]; null: one segment
  int64_t ldy, row_tiles, column_units;
  int32_t experts, m, outputs, output_tiles, stages;  // stages: of an item
  float alpha;
  DenseOut out;
  bool by_chunks;  // y is stored 16 bytes at a time

  __device__ GroupCursor cursor(int tokens) const {
    return GroupCursor(offsets, experts, m, tokens, output_tiles, 4);
  }
};

#ifdef MILLRACE_HAS_WGMMA

template <class Stages>
struct LowbitShared {
  uint8_t *tokens, *raw, *panels;
  uint64_t *full, *empty;
  __device__ explicit LowbitShared(uint8_t* base)
      : tokens(base),
        raw(base + Stages::kCount * Stages::kTokenBytes),
        panels(raw + Stages::kCount * Stages::kRawBytes),
        full(reinterpret_cast<uint64_t*>(panels + 2 * kLowbitPanelBytes)),
        empty(full + Stages::kCount) {}
  __device__ void init() const {
    for (int i = 0; i < Stages::kCount; ++i) {
      ptx::barrier_init(full + i, 2);
      ptx::barrier_init(empty + i, kLowbitWarps);
    }
    ptx::barrier_init_fence();
  }
};

// How many tokens an item's products have: half where that is enough.
template <int kMaxTokens>
__device__ inline int lowbit_width(int rows) {
  return kMaxTokens == kLowbitMaxTokens && rows <= kMaxTokens / 2 ? kMaxTokens / 2 : kMaxTokens;
}

// One of two threads: tokens, or units of weights, of all stages.
template <class Stages, bool kBackward, int kMaxTokens, bool kTokens>
__device__ void produce_lowbit(const LowbitProblem& p, const LowbitShared<Stages>& shared) {
  uint32_t stage = 0, parity = 1;
  GroupCursor cursor = p.cursor(kMaxTokens);
  GroupItem item;
  for (int index = static_cast<int>(blockIdx.x); cursor.find(index, item);
       index += static_cast<int>(gridDim.x)) {
    const int width = lowbit_width<kMaxTokens>(item.rows);
    const uint8_t* expert = p.weights + item.expert * p.row_tiles * p.column_units * Stages::kUnitBytes;
    for (int i = 0; i < p.stages; ++i) {
      ptx::barrier_wait(shared.empty + stage, parity);
      uint64_t* full = shared.full + stage;
      if constexpr (kTokens) {
        ptx::barrier_arrive_expect(full, static_cast<uint32_t>(width) * 256);
        uint8_t* to = shared.tokens + stage * Stages::kTokenBytes;
        for (int half = 0; half < 2; ++half) {
          for (int row = 0; row < width; row += Stages::kBoxRows) {
            ptx::tma_load_box(to + (half * kMaxTokens + row) * 128, &p.x, i * 128 + half * 64,
                              item.first_row + row, full);
          }
        }
      } else {
        ptx::barrier_arrive_expect(full, Stages::kRawBytes);
        uint8_t* to = shared.raw + stage * Stages::kRawBytes;
        for (int half = 0; half < 2; ++half) {
          // A tile that is not there: any, its outputs are not stored, or dy is zero.
          const int64_t tile =
              min(int64_t{kBackward ? 2 * i + half : 2 * item.column_tile + half}, p.row_tiles - 1);
          const int64_t unit = tile * p.column_units + (kBackward ? item.column_tile : i);
          ptx::bulk_copy_kept(to + half * Stages::kUnitBytes, expert + unit * Stages::kUnitBytes,
                              Stages::kUnitBytes, full);
        }
      }
      if (++stage == Stages::kCount) stage = 0, parity ^= 1u;
    }
  }
}

template <mr_lowbit_format kFormat, bool kBackward, int kMaxTokens>
struct LowbitConsumer {
  using Stages = LowbitStages<kFormat, kMaxTokens>;
  using Shared = LowbitShared<Stages>;
  struct Fragments {
    uint32_t a[4][4];
  };
  const LowbitProblem& p;
  const Shared& shared;
  const int warpgroup, warp, lane;  // warp of the warpgroup
  uint32_t stage = 0, parity = 0;

  __device__ LowbitConsumer(const LowbitProblem& problem, const Shared& of, int index, int lane_index)
      : p(problem), shared(of), warpgroup(index / 4), warp(index % 4), lane(lane_index) {}

  __device__ void release(uint32_t read) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(shared.empty + read);
  }
  // Half of a stage's weights: four steps of 16 of the reduced dimension.
  template <int kHalf>
  __device__ __forceinline__ void load(Fragments& f) const {
    const uint8_t* raw =
        shared.raw + stage * Stages::kRawBytes + (kBackward ? kHalf : warpgroup) * Stages::kUnitBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBackward) {
        uint32_t w[4];
        LowbitWeights<kFormat>::load(raw, 4 * warpgroup + warp, i, lane, w);
        f.a[i][0] = ptx::transpose_matrix_anywhere(w[0]);
        f.a[i][1] = ptx::transpose_matrix_anywhere(w[2]);
        f.a[i][2] = ptx::transpose_matrix_anywhere(w[1]);
        f.a[i][3] = ptx::transpose_matrix_anywhere(w[3]);
      } else {
        LowbitWeights<kFormat>::load(raw, 4 * kHalf + i, warp, lane, f.a[i]);
      }
    }
  }
  template <int kHalf, int kSums>
  __device__ __forceinline__ void multiply(const Fragments& f, float (&acc)[kSums], bool first) const {
    const uint64_t b =
        ptx::wgmma_operand(shared.tokens + stage * Stages::kTokenBytes + kHalf * kMaxTokens * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma_16bit<__nv_bfloat16, 0>(acc, f.a[i], b + 2 * i, !first || i > 0);
    ptx::wgmma_commit();
  }
  // Adds the totals of the segments before, and keeps them unless this was the last.
  template <int kSums>
  __device__ void end_segment(float (&acc)[kSums], bool first, bool last) const {
    float4* slot = reinterpret_cast<float4*>(p.totals) +
                   (int64_t{blockIdx.x} * 2 + warpgroup) * (kLowbitMaxTokens / 8) * 128 + warp * 32 + lane;
    if (!first) {
#pragma unroll
      for (int i = 0; i < kSums; i += 32) {
        float4 old[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) old[j] = slot[(i / 4 + j) * 128];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          acc[i + 4 * j] = old[j].x + acc[i + 4 * j];
          acc[i + 4 * j + 1] = old[j].y + acc[i + 4 * j + 1];
          acc[i + 4 * j + 2] = old[j].z + acc[i + 4 * j + 2];
          acc[i + 4 * j + 3] = old[j].w + acc[i + 4 * j + 3];
        }
      }
    }
    if (!last) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4)
        slot[i / 4 * 128] = make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
    }
  }

  template <int kSums>
  __device__ void run(const GroupItem& item) {
    float acc[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;  // defined before the first product is under way
    Fragments even, odd;
    for (int i = 0; i < p.stages;) {
      const int last = min(p.stages, i + quant::kSegmentUnits);
      const bool first_segment = i == 0;
      uint32_t before = 0;
      for (bool first = true; i < last; ++i, first = false) {
        ptx::barrier_wait(shared.full + stage, parity);
        load<0>(even);
        multiply<0>(even, acc, first);
        if (!first) {
          ptx::wgmma_wait<1>();
          release(before);
        }
        load<1>(odd);
        multiply<1>(odd, acc, false);
        ptx::wgmma_wait<1>();
        before = stage;
        if (++stage == Stages::kCount) stage = 0, parity ^= 1u;
      }
      ptx::wgmma_wait<0>();
      ptx::fence_registers(acc);
      release(before);
      if (p.totals != nullptr) end_segment(acc, first_segment, last == p.stages);
    }
    store(item, acc);
  }

  // 64 outputs by 2 kSums tokens, 32 tokens at a time by the same instructions.
  template <int kSums>
  __device__ void store(const GroupItem& item, float (&acc)[kSums]) const {
    const int first = item.column_tile * kLowbitOutputs + warpgroup * 64;
    if (first >= p.outputs) return;
    float bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = first + 16 * warp + lane / 4 + 8 * half;
      if (p.bias != nullptr && output < p.outputs)
        bias[half] = p.bias[int64_t{item.expert} * p.outputs + output];
    }
    const float scale = p.expert_scales != nullptr ? p.alpha * p.expert_scales[item.expert] : p.alpha;
    uint8_t* panel = shared.panels + warpgroup * kLowbitPanelBytes;
#pragma unroll 1
    for (int token = 0; token < 2 * kSums && token < item.rows; token += 32) {
      float y[16];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        y[i] = fmaf(acc[i] * LowbitWeights<kFormat>::kUnscale, scale, bias[i % 4 / 2]);
#pragma unroll
      for (int i = 0; i < kSums - 16; ++i) acc[i] = acc[i + 16];
      if (p.out == DenseOut::kF32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          begin_panel();
          const uint32_t at = static_cast<uint32_t>(lane % 4 * 2 * 272 + (16 * warp + lane / 4) * 4);
          *reinterpret_cast<float*>(panel + at) = y[4 * i];
          *reinterpret_cast<float*>(panel + at + 272) = y[4 * i + 1];
          *reinterpret_cast<float*>(panel + at + 32) = y[4 * i + 2];
          *reinterpret_cast<float*>(panel + at + 272 + 32) = y[4 * i + 3];
          store_panel<4>(item, panel, token + 8 * i, first);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          begin_panel();
          uint32_t packed[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            packed[j] = p.out == DenseOut::kBf16
                            ? lowbit::as_word(__floats2bfloat162_rn(y[8 * i + 2 * j], y[8 * i + 2 * j + 1]))
                            : half_pair(y[8 * i + 2 * j], y[8 * i + 2 * j + 1]);
          }
          // Matrix j: outputs 8 (j % 2) and on, tokens 8 (j / 2) and on; a lane's address is a token's.
          const int matrix = lane / 8;
          const auto at =
              static_cast<uint32_t>((lane % 8 + matrix / 2 * 8) * 144 + (16 * warp + matrix % 2 * 8) * 2);
          ptx::store_matrices_transposed(ptx::shared_address(panel) + at, packed);
          store_panel<2>(item, panel, token + 16 * i, first);
        }
      }
    }
  }
  __device__ static uint32_t half_pair(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  // Everybody has read the panel.
  __device__ void begin_panel() const { ptx::named_barrier<128>(1 + warpgroup); }
  // The panel's tokens, of 64 outputs of kBytes each, from token `token` of the item on.
  template <int kBytes>
  __device__ void store_panel(const GroupItem& item, const uint8_t* panel, int token, int first) const {
    ptx::named_barrier<128>(1 + warpgroup);  // everybody has written
    constexpr int kChunks = 64 * kBytes / 16, kPitch = kBytes == 4 ? 272 : 144, kPer = 16 / kBytes;
    const int thread = 32 * warp + lane, row = thread / kChunks, chunk = thread % kChunks;
    if (token + row >= item.rows) return;
    const int column = first + chunk * kPer;
    const uint4 value = *reinterpret_cast<const uint4*>(panel + row * kPitch + chunk * 16);
    uint8_t* to =
        static_cast<uint8_t*>(p.y) + (int64_t{item.first_row + token + row} * p.ldy + column) * kBytes;
    if (p.by_chunks && column + kPer <= p.outputs) {
      *reinterpret_cast<uint4*>(to) = value;
      return;
    }
    const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (column + i >= p.outputs) continue;
      if constexpr (kBytes == 4) {
        reinterpret_cast<uint32_t*>(to)[i] = words[i];
      } else {
        reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
      }
    }
  }

  __device__ void run_all() {
    GroupCursor cursor = p.cursor(kMaxTokens);
    GroupItem item;
    for (int index = static_cast<int>(blockIdx.x); cursor.find(index, item);
         index += static_cast<int>(gridDim.x)) {
      if (lowbit_width<kMaxTokens>(item.rows) == kMaxTokens) {
        run<kMaxTokens / 2>(item);
      } else if constexpr (kMaxTokens == kLowbitMaxTokens) {
        run<kMaxTokens / 4>(item);
      }
    }
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <mr_lowbit_format kFormat, bool kBackward, int kMaxTokens>
__global__ void __launch_bounds__(kLowbitThreads, 1)
    gemm_lowbit_wgmma_kernel(const __grid_constant__ LowbitProblem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t lowbit_raw[];
  using Stages = LowbitStages<kFormat, kMaxTokens>;
  const LowbitShared<Stages> shared(lowbit_raw);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  if (warp >= kLowbitWarps) {
    ptx::fewer_registers<40>();
    if (warp == kLowbitWarps && lane == 0) produce_lowbit<Stages, kBackward, kMaxTokens, true>(p, shared);
    if (warp == kLowbitWarps + 1 && lane == 0)
      produce_lowbit<Stages, kBackward, kMaxTokens, false>(p, shared);
  } else {
    ptx::more_registers<232>();
    LowbitConsumer<kFormat, kBackward, kMaxTokens>(p, shared, warp, lane).run_all();
  }
#else
  __trap();
#endif
}

template <mr_lowbit_format kFormat, bool kBackward, int kMaxTokens>
void launch_lowbit_as(const LowbitGemm& op, const Launch& at) {
  using Stages = LowbitStages<kFormat, kMaxTokens>;
  const quant::UnitGrid grid(op.n, op.k);
  LowbitProblem p{};
  p.x = dense_map(at.device, op.x, 2, op.reduced(), op.m, op.ldx, Stages::kBoxRows);
  p.weights = op.weights;
  p.expert_scales = op.expert_scales;
  p.bias = op.bias;
  p.offsets = op.offsets;
  p.y = op.y;
  p.ldy = op.ldy;
  p.row_tiles = grid.row_tiles;
  p.column_units = grid.column_units;
  p.experts = op.experts;
  p.m = static_cast<int32_t>(op.m);
  p.outputs = static_cast<int32_t>(op.outputs());
  p.output_tiles = static_cast<int32_t>((op.outputs() + kLowbitOutputs - 1) / kLowbitOutputs);
  p.stages = static_cast<int32_t>((op.reduced() + 127) / 128);
  p.totals = p.stages > quant::kSegmentUnits ? op.workspace : nullptr;
  p.alpha = op.alpha;
  p.out = op.out;
  const int64_t bytes = op.out == DenseOut::kF32 ? 4 : 2;
  p.by_chunks = reinterpret_cast<uintptr_t>(op.y) % 16 == 0 && op.ldy * bytes % 16 == 0;
  // At most: an expert's last tile may be short.
  const int64_t tiles = ((op.m + kMaxTokens - 1) / kMaxTokens + op.experts) * p.output_tiles;
  const int64_t ctas = tiles < at.device.sm_count() ? tiles : at.device.sm_count();
  const auto kernel = gemm_lowbit_wgmma_kernel<kFormat, kBackward, kMaxTokens>;
  allow_shared_memory(kernel, Stages::kBytes);
  launch_dependent("gemm_lowbit_wgmma_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kLowbitThreads,
                   Stages::kBytes, at, p);
}

template <mr_lowbit_format kFormat>
void launch_lowbit_wgmma(const LowbitGemm& op, const Launch& at) {
  // Rows that an expert has, if all have as many.
  const bool few = op.m <= 64 * int64_t{op.experts};
  if (op.backward) {
    few ? launch_lowbit_as<kFormat, true, 64>(op, at)
        : launch_lowbit_as<kFormat, true, kLowbitMaxTokens>(op, at);
  } else {
    few ? launch_lowbit_as<kFormat, false, 64>(op, at)
        : launch_lowbit_as<kFormat, false, kLowbitMaxTokens>(op, at);
  }
}

}  // namespace millrace::cuda
