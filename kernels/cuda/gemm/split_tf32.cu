// Products of split elements (gemm/split.h): 128 x 128 outputs of a CTA, eight warps 64 x 32 each, stages of
// 16 of k as float32 in shared memory, [k][outputs] with rows 136 apart: fragments' lanes (k t, output g) are
// banks 8 t + g. While a stage is multiplied the next one is on its way to registers.
//
// x = hi + lo, hi its upper 11 bits of mantissa, lo the next 11; a b is lo hi + hi lo + hi hi, without the
// second where b has no more bits than hi.
//
// Roofline: a warp's step of 8 of k is 32 or 48 products of m16n8k8 and 72 to 120 instructions that split
// operands: a half or a third of TF32's rate, if the products set the pace. They do not: 20 TFLOP/s at
// 4,096^3 on an H200, a tenth of that, with one CTA of 242 registers a thread on an SM and stages that all of
// its warps wait for.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/gemm/group_schedule.cuh"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/gemm/split.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/mma_tf32.cuh"

namespace millrace::cuda {
namespace {

constexpr int kTile = 128, kDepth = 16, kThreads = 256, kPitch = kTile + 8, kRun = 8;
constexpr int kBlockDepth = 256;  // of k whose sum is taken apart
static_assert(kTile * kDepth == kThreads * kRun && kBlockDepth % kDepth == 0);

// An operand of one tile: outer elements [first, last) and k up to k_last.
struct TileOperand {
  SplitOperand p;
  bool whole;  // runs of eight begin at whole vectors
  int64_t first, last, k_last;

  // A thread's run: eight of k of one outer element, or eight outer elements at one k.
  __device__ int outer_of() const {
    const int t = static_cast<int>(threadIdx.x);
    return p.k_major ? t % kTile : t % (kTile / kRun) * kRun;
  }
  __device__ int k_of() const {
    const int t = static_cast<int>(threadIdx.x);
    return p.k_major ? t / kTile * kRun : t / (kTile / kRun);
  }

  // As they lie in memory, zeros outside.
  __device__ void load(int64_t k_first, uint32_t (&raw)[kRun]) const {
    const int64_t outer = first + outer_of(), k = k_first + k_of();
#pragma unroll
    for (int i = 0; i < kRun; ++i) raw[i] = 0;
    if (outer >= last || k >= k_last) return;
    const int64_t left = p.k_major ? k_last - k : last - outer;
    const int64_t at = p.k_major ? outer * p.ld + k : k * p.ld + outer;
    const uint8_t* from = static_cast<const uint8_t*>(p.data) + at * split_bytes(p.type);
    if (whole && left >= kRun) {
      if (p.type == SplitType::kF32) {
        const uint4 x = *reinterpret_cast<const uint4*>(from), y = *reinterpret_cast<const uint4*>(from + 16);
        raw[0] = x.x, raw[1] = x.y, raw[2] = x.z, raw[3] = x.w;
        raw[4] = y.x, raw[5] = y.y, raw[6] = y.z, raw[7] = y.w;
      } else if (split_bytes(p.type) == 2) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        raw[0] = x.x, raw[1] = x.y, raw[2] = x.z, raw[3] = x.w;
      } else {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        raw[0] = x.x, raw[1] = x.y;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i >= left) break;
      if (p.type == SplitType::kF32) {
        raw[i] = reinterpret_cast<const uint32_t*>(from)[i];
      } else if (split_bytes(p.type) == 2) {
        raw[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(from)[i]} << (16 * (i % 2));
      } else {
        raw[i / 4] |= uint32_t{from[i]} << (8 * (i % 4));
      }
    }
  }

  __device__ float value(const uint32_t (&raw)[kRun], int i) const {
    switch (p.type) {
      case SplitType::kF32:
        return __uint_as_float(raw[i]);
      case SplitType::kF16:
        return __half2float(__ushort_as_half(static_cast<uint16_t>(raw[i / 2] >> (16 * (i % 2)))));
      case SplitType::kBf16:
        return __uint_as_float(i % 2 == 0 ? raw[i / 2] << 16 : raw[i / 2] & 0xffff0000u);
      case SplitType::kE4m3: {
        __nv_fp8_e4m3 x;
        x.__x = static_cast<uint8_t>(raw[i / 4] >> (8 * (i % 4)));
        return static_cast<float>(x);
      }
      default: {
        __nv_fp8_e5m2 x;
        x.__x = static_cast<uint8_t>(raw[i / 4] >> (8 * (i % 4)));
        return static_cast<float>(x);
      }
    }
  }

  // The run as float32, with scales, to the stage [k][outer].
  __device__ void store(int64_t k_first, const uint32_t (&raw)[kRun], float* stage) const {
    float v[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) v[i] = value(raw, i);
    const int64_t outer = first + outer_of(), k = k_first + k_of();
    if (p.scales != nullptr && outer < last && k < k_last) {
      const int64_t left = p.k_major ? k_last - k : last - outer;
      const bool one = (p.k_major ? p.k_group : p.outer_group) >= kRun;  // runs begin at multiples of eight
      float scale = 1.0f;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (i < left) {
          const int64_t o = outer + (p.k_major ? 0 : i), at = k + (p.k_major ? i : 0);
          if (i == 0 || !one)
            scale = p.scales[o / p.outer_group * p.outer_stride + at / p.k_group * p.k_stride];
          v[i] *= scale;
        }
      }
    }
    if (p.k_major) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) stage[(k_of() + i) * kPitch + outer_of()] = v[i];
    } else {
      auto* to = reinterpret_cast<float4*>(stage + k_of() * kPitch + outer_of());
      to[0] = make_float4(v[0], v[1], v[2], v[3]);
      to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  }
};

__device__ void split(float x, float& hi, float& lo) {
  constexpr uint32_t kKept = 0xffffe000u;  // sign, exponent, ten bits
  hi = __uint_as_float(__float_as_uint(x) & kKept);
  const float rest = fabsf(x) <= 3.402823466e38f ? x - hi : 0.0f;  // of infinity none is left
  lo = __uint_as_float(__float_as_uint(rest) & kKept);
}

template <bool kSplitB>
__device__ void multiply_stage(const float* a, const float* b, float (&sum)[4][4][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, row = warp / 4 * 64 + g, column = warp % 4 * 32 + g;
#pragma unroll
  for (int step = 0; step < kDepth / 8; ++step) {
    float b_hi[4][2], b_lo[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = b[(step * 8 + t + 4 * h) * kPitch + column + 8 * j];
        if constexpr (kSplitB) {
          split(x, b_hi[j][h], b_lo[j][h]);
        } else {
          b_hi[j][h] = x;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a_hi[4], a_lo[4];
#pragma unroll
      for (int h = 0; h < 4; ++h)
        split(a[(step * 8 + t + h / 2 * 4) * kPitch + row + 16 * i + h % 2 * 8], a_hi[h], a_lo[h]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::mma_tf32(sum[i][j], a_lo, b_hi[j][0], b_hi[j][1]);
        if constexpr (kSplitB) ptx::mma_tf32(sum[i][j], a_hi, b_lo[j][0], b_lo[j][1]);
        ptx::mma_tf32(sum[i][j], a_hi, b_hi[j][0], b_hi[j][1]);
      }
    }
  }
}

// Rows of c [c_row, c_row + rows) and columns from `column` on; k from k_first to the operands' end.
template <bool kSplitB>
__device__ void split_tile(const SplitGemm& p, const TileOperand& a, const TileOperand& b, int64_t k_first,
                           int64_t c_row, float* a_stage, float* b_stage) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float total[4][4][4], sum[4][4][4];
  // f(element of the fragments, its index in c) for those inside.
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t row = warp / 4 * 64 + 16 * i + 8 * h + lane / 4;
        if (a.first + row >= a.last) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const int64_t column = b.first + warp % 4 * 32 + 8 * j + lane % 4 * 2 + x;
            if (column < b.last) f(total[i][j][2 * h + x], (c_row + row) * p.ldc + column);
          }
        }
      }
    }
  };
#pragma unroll
  for (int i = 0; i < 64; ++i) total[i / 16][i / 4 % 4][i % 4] = sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
  if (p.accumulate) each([&](float& x, int64_t at) { x = static_cast<const float*>(p.c)[at]; });
  const auto add_block = [&] {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      total[i / 16][i / 4 % 4][i % 4] += sum[i / 16][i / 4 % 4][i % 4];
      sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
    }
  };
  uint32_t a_raw[kRun], b_raw[kRun];
  a.load(k_first, a_raw);
  b.load(k_first, b_raw);
  for (int64_t k = k_first; k < a.k_last; k += kDepth) {
    a.store(k, a_raw, a_stage);
    b.store(k, b_raw, b_stage);
    __syncthreads();  // the stage is there for every warp
    a.load(k + kDepth, a_raw);
    b.load(k + kDepth, b_raw);
    multiply_stage<kSplitB>(a_stage, b_stage, sum);
    if ((k + kDepth - k_first) % kBlockDepth == 0) add_block();
    __syncthreads();  // every warp has read the stage
  }
  if ((a.k_last - k_first) % kBlockDepth != 0) add_block();
  each([&](float& x, int64_t at) { store_out(p.c, at, p.out, p.alpha * x); });
}

template <bool kSplitB>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_split_kernel(const SplitGemm p, bool a_whole, bool b_whole) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ __align__(16) float a_stage[kDepth * kPitch], b_stage[kDepth * kPitch];
  const bool depth = p.groups == SplitGroups::kDepth;
  const auto column_tiles = static_cast<int32_t>((p.n + kTile - 1) / kTile),
             row_tiles = static_cast<int32_t>((p.m + kTile - 1) / kTile);
  GroupCursor cursor(p.groups == SplitGroups::kRows ? p.offsets : nullptr,
                     p.groups == SplitGroups::kRows ? p.experts : 1, static_cast<int32_t>(p.m), kTile,
                     column_tiles, 8);
  for (int64_t index = blockIdx.x;; index += gridDim.x) {
    TileOperand a{p.a, a_whole, 0, p.m, p.k}, b{p.b, b_whole, 0, p.n, p.k};
    int64_t k_first = 0, c_row = 0;
    if (depth) {
      const int64_t tiles = int64_t{row_tiles} * column_tiles;
      if (index >= p.experts * tiles) return;
      const auto expert = static_cast<int32_t>(index / tiles);
      a.first = index % tiles / column_tiles * kTile;
      b.first = index % column_tiles * kTile;
      k_first = p.offsets[expert];
      a.k_last = b.k_last = p.offsets[expert + 1];
      c_row = expert * p.m + a.first;
    } else {
      GroupItem item;
      if (!cursor.find(static_cast<int32_t>(index), item)) return;
      a.first = c_row = item.first_row;
      a.last = item.first_row + item.rows;
      b.first = int64_t{item.column_tile} * kTile;
      b.p.data = static_cast<const uint8_t*>(p.b.data) + item.expert * p.b_expert * split_bytes(p.b.type);
      if (p.b.scales != nullptr) b.p.scales = p.b.scales + item.expert * p.b_scales_of_expert;
    }
    split_tile<kSplitB>(p, a, b, k_first, c_row, a_stage, b_stage);
  }
}

bool has_whole_runs(const SplitOperand& p, int64_t expert) {
  const int64_t bytes = split_bytes(p.type), vector = bytes == 1 ? 8 : 16;
  return reinterpret_cast<uintptr_t>(p.data) % static_cast<uintptr_t>(vector) == 0 &&
         p.ld * bytes % vector == 0 && expert * bytes % vector == 0;
}

}  // namespace

void launch_split(const SplitGemm& op, const Launch& at) {
  if (op.m == 0 || op.n == 0) return;
  const bool b_exact = op.b.scales == nullptr && op.b.type != SplitType::kF32;
  const int64_t tiles = (op.m + kTile - 1) / kTile * ((op.n + kTile - 1) / kTile) *
                        (op.groups == SplitGroups::kDepth ? op.experts : 1);
  // Of experts' rows only the device knows how many tiles there are.
  const int64_t most = 4 * int64_t{at.device.sm_count()};
  const int64_t ctas = op.groups == SplitGroups::kRows || tiles > most ? most : tiles;
  launch_dependent("gemm_split_kernel", b_exact ? gemm_split_kernel<false> : gemm_split_kernel<true>,
                   dim3(static_cast<unsigned>(ctas)), kThreads, 0, at, op, has_whole_runs(op.a, 0),
                   has_whole_runs(op.b, op.b_expert));
}

}  // namespace millrace::cuda
