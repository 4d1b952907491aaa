// RMSNorm and LayerNorm of rows: residual, statistics, weight and quantization in one pass over a row that
// stays in registers. Roofline: memory.
#include <cuda_fp8.h>

#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/fused/team_launch.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/approx.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

struct NormParams {
  Rows x, residual, sum, y, weight, bias;
  bool layer, has_residual, has_y, has_weight, has_bias;
  float weight_offset, eps, by_cols;  // by_cols: 1 / cols
  float *mean, *rstd;
  mr_norm_quantize quantize;
  uint8_t* codes;
  int64_t codes_stride;
  bool codes_aligned;  // to 8 bytes, as are rows
  float* scales;
  int64_t scales_stride;
  int64_t rows, cols;
};

enum class Codes { kNone, kParts, kRows };  // with a scale for 128 columns, or for a row

// What a kernel knows when it is compiled: nothing, or that all arrays are plain BF16, which norm it is and
// what codes there are. kThreads: of an SM, so many that their loads keep the memory busy.
struct AnyNorm {
  static constexpr Form kForm = Form::kAny;
  static constexpr int kThreads = 0;
  __device__ static bool layer(const NormParams& op) { return op.layer; }
  __device__ static mr_norm_quantize quantize(const NormParams& op) { return op.quantize; }
};
template <bool kLayer, Codes kCodes>
struct PlainNorm {
  static constexpr Form kForm = Form::kBf16;
  static constexpr int kThreads = kCodes == Codes::kRows              ? 1280
                                  : kCodes == Codes::kParts || kLayer ? 1536
                                                                      : 2048;
  __device__ static constexpr bool layer(const NormParams&) { return kLayer; }
  __device__ static mr_norm_quantize quantize([[maybe_unused]] const NormParams& op) {
    if constexpr (kCodes == Codes::kNone) {
      return MR_QUANTIZE_NONE;
    } else if constexpr (kCodes == Codes::kParts) {
      return MR_QUANTIZE_FP8_1X128;
    } else {
      return op.quantize == MR_QUANTIZE_INT8_ROW ? MR_QUANTIZE_INT8_ROW : MR_QUANTIZE_FP8_ROW;
    }
  }
};

constexpr float kFp8Max = 448.0f, kInt8Max = 127.0f;
constexpr int kScaleColumns = 128;

// y / scale by a reciprocal, to 3 ulp, before it is rounded to a code; of zeros, whose scale is zero, zeros.
__device__ inline Values8 quotients(const Values8& y, float scale) {
  const float reciprocal = fminf(ptx::reciprocal_approx(scale), 3e38f);
  Values8 q;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) q.v[i] = y.v[i] * reciprocal;
  return q;
}

__device__ inline uint2 fp8_codes(const Values8& q) {
  uint32_t pairs[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    pairs[i] = __nv_cvt_float2_to_fp8x2({q.v[2 * i], q.v[2 * i + 1]}, __NV_SATFINITE, __NV_E4M3);
  }
  return {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410)};
}
// Added to 1.5 x 2^23 a number is rounded to an integer, whose low byte is the code. None is rounded beyond
// 127: the scale is a 127th of the largest.
__device__ inline uint2 int8_codes(const Values8& q) {
  uint32_t bits[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) bits[i] = __float_as_uint(q.v[i] + 12582912.0f);
  const auto four = [&](int at) {
    const uint32_t low = __byte_perm(bits[at], bits[at + 1], 0x0040),
                   high = __byte_perm(bits[at + 2], bits[at + 3], 0x0040);
    return __byte_perm(low, high, 0x5410);
  };
  return {four(0), four(4)};
}

__device__ inline void store_codes(const NormParams& op, int64_t row, int64_t col, int n, const Values8& y,
                                   float scale, mr_norm_quantize quantize) {
  uint8_t* to = op.codes + row * op.codes_stride + col;
  const Values8 q = quotients(y, scale);
  const uint2 codes = quantize == MR_QUANTIZE_INT8_ROW ? int8_codes(q) : fp8_codes(q);
  if (op.codes_aligned && n == kColumns) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < n) to[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
  }
}

__device__ inline float max_magnitude(const Values8& y, float most) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(y.v[i]));
  return most;
}

// x, or x + residual as it is stored.
template <Form kForm>
__device__ inline Raw8 summed(const NormParams& op, const Raw8& x, const Raw8& residual, int64_t row,
                              int64_t col, int n) {
  if (!op.has_residual) return x;
  Values8 s = to_float<kForm>(op.x, x);
  const Values8 r = to_float<kForm>(op.residual, residual);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) s.v[i] += r.v[i];
  const Raw8 rounded = from_float<kForm>(op.sum, s);
  store_raw8<kForm>(op.sum, row, col, n, rounded);
  return rounded;
}

// n * (weight + offset) + bias; zeros past the row's end.
template <class Known>
__device__ inline Values8 normed(const NormParams& op, const Values8& s, float mean, float rstd, int64_t col,
                                 int n) {
  constexpr Form kForm = Known::kForm;
  Values8 y;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) y.v[i] = (Known::layer(op) ? s.v[i] - mean : s.v[i]) * rstd;
  if (op.has_weight) {
    Values8 w = to_float<kForm>(op.weight, load8<kForm>(op.weight, 0, col, n));
    if (op.weight_offset != 0.0f) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) w.v[i] += op.weight_offset;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y.v[i] *= w.v[i];
  }
  if (op.has_bias) {
    const Values8 b = to_float<kForm>(op.bias, load8<kForm>(op.bias, 0, col, n));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y.v[i] += b.v[i];
  }
  // Of whole eights past the end only a mean is left, where nothing weights it.
  if (kForm == Form::kBf16 && (!Known::layer(op) || op.has_weight)) return y;
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

template <class Team, class Known>
inline constexpr int kNormCtas = Team::kGroups == 0 || Team::kGroups > 2 || Known::kThreads == 0
                                     ? 1
                                     : Known::kThreads / static_cast<int>(team_cta_threads<Team>());

template <class Team, class Known>
__global__ void __launch_bounds__(team_cta_threads<Team>(), (kNormCtas<Team, Known>))
    norm_kernel(NormParams op) {
  constexpr int kThreads = Team::kThreads, kGroups = Team::kGroups, kKept = kGroups > 0 ? kGroups : 1;
  constexpr Form kForm = Known::kForm;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float partial[3][kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTeams<kThreads> + threadIdx.x / kThreads;
  if (row >= op.rows) return;  // a whole warp, where a team is one
  const int64_t cols = op.cols;
  const bool layer = Known::layer(op);
  const mr_norm_quantize quantize = Known::quantize(op);
  const Rows& summed_in = op.has_residual ? op.sum : op.x;  // whose type s has
  const auto each = [&](auto&& f) { each_group<kThreads, kGroups, kForm>(cols, thread, f); };

  Raw8 s[kKept] = {};
  // The row again, where it did not fit into registers: this thread alone wrote what it reads of sum.
  const auto again = [&](int g, int64_t col, int n) {
    if constexpr (kGroups > 0) return to_float<kForm>(summed_in, s[g]);
    return to_float<kForm>(summed_in, load8<kForm>(summed_in, row, col, n));
  };
  float total = 0.0f;
  const auto add = [&](const Values8& v) {  // zeros past the end add nothing
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total = layer ? total + v.v[i] : fmaf(v.v[i], v.v[i], total);
  };
  if constexpr (kGroups > 0) {
    Raw8 residual[kKept];
    each([&](int g, int64_t col, int n) {
      s[g] = load8<kForm>(op.x, row, col, n);
      if (op.has_residual) residual[g] = load8<kForm>(op.residual, row, col, n);
    });
    each([&](int g, int64_t col, int n) {
      s[g] = summed<kForm>(op, s[g], residual[g], row, col, n);
      add(to_float<kForm>(summed_in, s[g]));
    });
  } else {
    each([&](int, int64_t col, int n) {
      const Raw8 x = load8<kForm>(op.x, row, col, n);
      const Raw8 residual = op.has_residual ? load8<kForm>(op.residual, row, col, n) : x;
      add(to_float<kForm>(summed_in, summed<kForm>(op, x, residual, row, col, n)));
    });
  }
  total = team_sum<kThreads>(total, partial[0]);

  float mean = 0.0f;
  if (layer) {
    mean = total * op.by_cols;
    float squares = 0.0f;
    each([&](int g, int64_t col, int n) {
      const Values8 v = again(g, col, n);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float off = v.v[i] - mean;
        if (i < n) squares = fmaf(off, off, squares);
      }
    });
    total = team_sum<kThreads>(squares, partial[1]);
  }
  const float rstd = 1.0f / sqrtf(fmaf(total, op.by_cols, op.eps));
  if (thread == 0) {
    if (op.mean != nullptr) op.mean[row] = mean;
    if (op.rstd != nullptr) op.rstd[row] = rstd;
  }

  // Outputs of rows with one scale are computed once where they fit into registers, else twice.
  constexpr bool kKeepY = kForm == Form::kBf16 && kGroups > 0 && kGroups <= 2;
  Values8 kept[kKeepY ? kKept : 1] = {};
  float row_scale = 0.0f;
  const bool by_row = quantize == MR_QUANTIZE_FP8_ROW || quantize == MR_QUANTIZE_INT8_ROW;
  if (by_row) {
    float most = 0.0f;
    each([&](int g, int64_t col, int n) {
      const Values8 y = normed<Known>(op, again(g, col, n), mean, rstd, col, n);
      if constexpr (kKeepY) kept[g] = y;
      most = max_magnitude(y, most);
    });
    row_scale = team_max<kThreads>(most, partial[2]) *
                (quantize == MR_QUANTIZE_INT8_ROW ? 1.0f / kInt8Max : 1.0f / kFp8Max);
    if (thread == 0) op.scales[row * op.scales_stride] = row_scale;
  }
  each([&](int g, int64_t col, int n) {
    const Values8 y =
        kKeepY && by_row ? kept[kKeepY ? g : 0] : normed<Known>(op, again(g, col, n), mean, rstd, col, n);
    if (op.has_y) store8<kForm>(op.y, row, col, n, y);
    if (by_row) store_codes(op, row, col, n, y, row_scale, quantize);
    if (quantize == MR_QUANTIZE_FP8_1X128) {
      const float scale = max_of_16_lanes(max_magnitude(y, 0.0f)) * (1.0f / kFp8Max);
      if (col % kScaleColumns == 0 && n > 0) op.scales[row * op.scales_stride + col / kScaleColumns] = scale;
      store_codes(op, row, col, n, y, scale, quantize);
    }
  });
}

// f(what is known of all arrays of `op`)
template <class F>
void with_known(const NormParams& op, F&& f) {
  bool plain = op.cols % kColumns == 0;
  for (const Rows& rows : {op.x, op.residual, op.sum, op.y, op.weight, op.bias}) {
    plain = plain && is_plain_bf16(rows);
  }
  if (!plain) return f(AnyNorm{});
  const auto with_codes = [&]<bool kLayer>() {
    if (op.quantize == MR_QUANTIZE_NONE) return f(PlainNorm<kLayer, Codes::kNone>{});
    if (op.quantize == MR_QUANTIZE_FP8_1X128) return f(PlainNorm<kLayer, Codes::kParts>{});
    f(PlainNorm<kLayer, Codes::kRows>{});
  };
  op.layer ? with_codes.template operator()<true>() : with_codes.template operator()<false>();
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
      .by_cols = 1.0f / static_cast<float>(args.cols),
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
    with_known(op, [&](auto known) {
      using Team = decltype(team);
      launch_overlapping("norm_kernel", 1, norm_kernel<Team, decltype(known)>,
                         dim3(team_ctas<Team>(args.rows)), team_cta_threads<Team>(), 0, at, op);
    });
  });
}

}  // namespace millrace::cuda
