// RMSNorm and LayerNorm of rows: residual, statistics, weight and quantization in one pass over a row that
// stays in registers. Roofline: memory.
#include <cuda_fp8.h>

#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/fused/team_launch.h"

namespace millrace::cuda {
namespace {

struct NormParams {
  Rows x, residual, sum, y, weight, bias;
  bool layer, has_residual, has_y, has_weight, has_bias;
  float weight_offset, eps;
  float *mean, *rstd;
  mr_norm_quantize quantize;
  uint8_t* codes;
  int64_t codes_stride;
  bool codes_aligned;  // to 8 bytes, as are rows
  float* scales;
  int64_t scales_stride;
  int64_t rows, cols;
};

constexpr float kFp8Max = 448.0f, kInt8Max = 127.0f;
constexpr int kScaleColumns = 128;

__device__ inline uint8_t code_of(float value, float scale, bool int8) {
  const float q = scale > 0.0f ? value / scale : 0.0f;
  if (!int8) return __nv_cvt_float_to_fp8(q, __NV_SATFINITE, __NV_E4M3);
  return static_cast<uint8_t>(static_cast<int8_t>(fminf(fmaxf(rintf(q), -kInt8Max), kInt8Max)));
}

__device__ inline void store_codes(const NormParams& op, int64_t row, int64_t col, int n, const Values8& y,
                                   float scale) {
  uint8_t* to = op.codes + row * op.codes_stride + col;
  const bool int8 = op.quantize == MR_QUANTIZE_INT8_ROW;
  uint8_t code[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) code[i] = code_of(y.v[i], scale, int8);
  if (op.codes_aligned && n == kColumns) {
    uint2 both;
    memcpy(&both, code, sizeof both);
    *reinterpret_cast<uint2*>(to) = both;
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < n) to[i] = code[i];
  }
}

__device__ inline float max_magnitude(const Values8& y, float most) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(y.v[i]));
  return most;
}

// s: x, or x + residual as it is stored.
__device__ inline Values8 summed(const NormParams& op, const Raw8& x, const Raw8& residual, int64_t row,
                                 int64_t col, int n) {
  Values8 s = to_float(op.x, x);
  if (!op.has_residual) return s;
  const Values8 r = to_float(op.residual, residual);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) s.v[i] += r.v[i];
  const Raw8 rounded = from_float(op.sum, s);
  store_raw8(op.sum, row, col, n, rounded);
  return to_float(op.sum, rounded);
}

// n * (weight + offset) + bias; zeros past the row's end.
__device__ inline Values8 normed(const NormParams& op, const Values8& s, float mean, float rstd, int64_t col,
                                 int n) {
  Values8 y;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) y.v[i] = (s.v[i] - mean) * rstd;
  if (op.has_weight) {
    const Values8 w = to_float(op.weight, load8(op.weight, 0, col, n));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y.v[i] *= w.v[i] + op.weight_offset;
  }
  if (op.has_bias) {
    const Values8 b = to_float(op.bias, load8(op.bias, 0, col, n));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y.v[i] += b.v[i];
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i >= n) y.v[i] = 0.0f;
  }
  return y;
}

// The largest of 128 columns, which sixteen neighbouring lanes have.
__device__ inline float max_of_16_lanes(float value) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads* kTeams<kThreads>) norm_kernel(NormParams op) {
  constexpr int kKept = kGroups > 0 ? kGroups : 1;
  __shared__ float partial[3][kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTeams<kThreads> + threadIdx.x / kThreads;
  if (row >= op.rows) return;  // a whole warp, where a team is one
  const int64_t cols = op.cols;
  const float size = static_cast<float>(cols);

  Values8 s[kKept] = {};
  // The row again, where it did not fit into registers: this thread alone wrote what it reads of sum.
  const auto again = [&](int g, int64_t col, int n) {
    if constexpr (kGroups > 0) return s[g];
    const Rows& from = op.has_residual ? op.sum : op.x;
    return to_float(from, load8(from, row, col, n));
  };
  float total = 0.0f;
  const auto add = [&](const Values8& v) {  // zeros past the end add nothing
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total = op.layer ? total + v.v[i] : fmaf(v.v[i], v.v[i], total);
  };
  if constexpr (kGroups > 0) {
    Raw8 x[kKept], residual[kKept];
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      x[g] = load8(op.x, row, col, n);
      if (op.has_residual) residual[g] = load8(op.residual, row, col, n);
    });
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      s[g] = summed(op, x[g], residual[g], row, col, n);
      add(s[g]);
    });
  } else {
    each_group<kThreads, kGroups>(cols, thread, [&](int, int64_t col, int n) {
      const Raw8 x = load8(op.x, row, col, n);
      const Raw8 residual = op.has_residual ? load8(op.residual, row, col, n) : x;
      add(summed(op, x, residual, row, col, n));
    });
  }
  total = team_sum<kThreads>(total, partial[0]);

  float mean = 0.0f;
  if (op.layer) {
    mean = total / size;
    float squares = 0.0f;
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      const Values8 v = again(g, col, n);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float off = v.v[i] - mean;
        if (i < n) squares = fmaf(off, off, squares);
      }
    });
    total = team_sum<kThreads>(squares, partial[1]);
  }
  const float rstd = 1.0f / sqrtf(total / size + op.eps);
  if (thread == 0) {
    if (op.mean != nullptr) op.mean[row] = mean;
    if (op.rstd != nullptr) op.rstd[row] = rstd;
  }

  float row_scale = 0.0f;
  const bool by_row = op.quantize == MR_QUANTIZE_FP8_ROW || op.quantize == MR_QUANTIZE_INT8_ROW;
  if (by_row) {
    float most = 0.0f;
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      most = max_magnitude(normed(op, again(g, col, n), mean, rstd, col, n), most);
    });
    row_scale =
        team_max<kThreads>(most, partial[2]) / (op.quantize == MR_QUANTIZE_INT8_ROW ? kInt8Max : kFp8Max);
    if (thread == 0) op.scales[row * op.scales_stride] = row_scale;
  }
  each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
    const Values8 y = normed(op, again(g, col, n), mean, rstd, col, n);
    if (op.has_y) store8(op.y, row, col, n, y);
    if (by_row) store_codes(op, row, col, n, y, row_scale);
    if (op.quantize == MR_QUANTIZE_FP8_1X128) {
      const float scale = max_of_16_lanes(max_magnitude(y, 0.0f)) / kFp8Max;
      if (col % kScaleColumns == 0 && n > 0) op.scales[row * op.scales_stride + col / kScaleColumns] = scale;
      store_codes(op, row, col, n, y, scale);
    }
  });
}

}  // namespace

void launch_norm(const mr_norm_args& args, const Launch& at) {
  const NormParams op{
      .x = rows_of(args.x),
      .residual = rows_of(args.residual),
      .sum = rows_of(args.sum),
      .y = rows_of(args.y),
      .weight = rows_of(args.weight),
      .bias = rows_of(args.bias),
      .layer = args.kind == MR_NORM_LAYER,
      .has_residual = args.residual.data != nullptr,
      .has_y = args.y.data != nullptr,
      .has_weight = args.weight.data != nullptr,
      .has_bias = args.bias.data != nullptr,
      .weight_offset = args.weight_offset,
      .eps = args.eps,
      .mean = args.mean,
      .rstd = args.rstd,
      .quantize = args.quantize,
      .codes = static_cast<uint8_t*>(args.codes),
      .codes_stride = args.codes_stride,
      .codes_aligned = reinterpret_cast<uintptr_t>(args.codes) % 8 == 0 && args.codes_stride % 8 == 0,
      .scales = args.scales,
      .scales_stride = args.scales_stride,
      .rows = args.rows,
      .cols = args.cols,
  };
  with_team(args.cols, [&](auto team) {
    using Team = decltype(team);
    norm_kernel<Team::kThreads, Team::kGroups>
        <<<team_ctas<Team>(args.rows), team_cta_threads<Team>(), 0, at.stream>>>(op);
  });
  check_launch("norm_kernel");
}

}  // namespace millrace::cuda
