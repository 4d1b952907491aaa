// Rotary position embedding of rows, one CTA per row: its angles are computed once for all heads. Roofline:
// memory.
#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

struct RotaryParams {
  Rows x, y;
  const float* inv_freq;
  const int32_t* positions;
  float magnitude, sign;  // sign: of the angle
  int half, heads, head_dim;
  bool interleaved;
  FastDivide by_head;  // units of a head
};

// The angle is in double, without its whole turns: at position 100,000 a float32 angle is off by thousandths.
__device__ inline float2 cos_sin_at(const RotaryParams& op, int32_t position, int i) {
  constexpr double kTurn = 6.283185307179586, kTurns = 0.15915494309189535;
  const double angle = static_cast<double>(position) * static_cast<double>(op.inv_freq[i]);
  float s, c;
  sincosf(static_cast<float>(fma(-rint(angle * kTurns), kTurn, angle)), &s, &c);
  return {c * op.magnitude, s * op.magnitude * op.sign};
}

__device__ inline void turn(float& a, float& b, float2 by) {
  const float a0 = a, b0 = b;
  a = fmaf(a0, by.x, -(b0 * by.y));
  b = fmaf(b0, by.x, a0 * by.y);
}

// Eight pairs (i, i + half), eight columns of four pairs (2 i, 2 i + 1), or eight columns that are not
// turned.
__device__ inline void turn_unit(const RotaryParams& op, int64_t row, int head, int unit,
                                 const float2* cos_sin) {
  const int64_t base = static_cast<int64_t>(head) * op.head_dim;
  const int turned = op.interleaved ? op.half / 4 : op.half / 8;
  if (unit >= turned) {
    const int64_t col = base + 2 * op.half + (unit - turned) * kColumns;
    const Values8 same = to_float(op.x, load8(op.x, row, col, kColumns));
    store8(op.y, row, col, kColumns, same);
  } else if (op.interleaved) {
    const int64_t col = base + unit * kColumns;
    Values8 v = to_float(op.x, load8(op.x, row, col, kColumns));
#pragma unroll
    for (int i = 0; i < 4; ++i) turn(v.v[2 * i], v.v[2 * i + 1], cos_sin[unit * 4 + i]);
    store8(op.y, row, col, kColumns, v);
  } else {
    const int64_t col = base + unit * kColumns;
    const Raw8 raw_a = load8(op.x, row, col, kColumns), raw_b = load8(op.x, row, col + op.half, kColumns);
    Values8 a = to_float(op.x, raw_a), b = to_float(op.x, raw_b);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) turn(a.v[i], b.v[i], cos_sin[unit * kColumns + i]);
    store8(op.y, row, col, kColumns, a);
    store8(op.y, row, col + op.half, kColumns, b);
  }
}

// One pair, or one dimension that is not turned.
__device__ inline void turn_one(const RotaryParams& op, int64_t row, int head, int unit,
                                const float2* cos_sin) {
  const int64_t base = static_cast<int64_t>(head) * op.head_dim;
  if (unit >= op.half) {
    const int64_t col = base + op.half + unit;
    store8(op.y, row, col, 1, to_float(op.x, load8(op.x, row, col, 1)));
    return;
  }
  const int64_t first = base + (op.interleaved ? 2 * unit : unit),
                second = first + (op.interleaved ? 1 : op.half);
  Values8 a = to_float(op.x, load8(op.x, row, first, 1)), b = to_float(op.x, load8(op.x, row, second, 1));
  turn(a.v[0], b.v[0], cos_sin[unit]);
  store8(op.y, row, first, 1, a);
  store8(op.y, row, second, 1, b);
}

template <bool kEights>
__global__ void __launch_bounds__(kThreads) rotary_rows_kernel(RotaryParams op) {
  extern __shared__ float2 cos_sin[];  // [half]: cos and sin, times magnitude
  const int64_t row = blockIdx.x;
  const int32_t position = op.positions[row];
  for (int i = threadIdx.x; i < op.half; i += kThreads) cos_sin[i] = cos_sin_at(op, position, i);
  __syncthreads();  // all angles are there before any is used
  const auto units = static_cast<uint32_t>(op.heads) * op.by_head.divisor;
  for (uint32_t i = threadIdx.x; i < units; i += kThreads) {
    const uint32_t head = op.by_head(i), unit = i - head * op.by_head.divisor;
    if constexpr (kEights) {
      turn_unit(op, row, static_cast<int>(head), static_cast<int>(unit), cos_sin);
    } else {
      turn_one(op, row, static_cast<int>(head), static_cast<int>(unit), cos_sin);
    }
  }
}

}  // namespace

void launch_rotary_rows(const mr_rotary_args& args, const Launch& at) {
  const int half = args.rotary.num_freqs, rest = args.head_dim - 2 * half;
  const bool interleaved = args.rotary.interleaved != 0, copies = args.x.data != args.y.data;
  const Rows x = rows_of(args.x), y = rows_of(args.y);
  const bool eights =
      x.aligned && y.aligned && args.head_dim % kColumns == 0 && half % (interleaved ? 4 : kColumns) == 0;
  const int turned = !eights ? half : interleaved ? half / 4 : half / kColumns;
  const int units = turned + (!copies ? 0 : eights ? rest / kColumns : rest);  // of a head
  if (units == 0) return;
  const RotaryParams op{.x = x,
                        .y = y,
                        .inv_freq = args.rotary.inv_freq,
                        .positions = args.positions,
                        .magnitude = args.rotary.magnitude,
                        .sign = args.inverse != 0 ? -1.0f : 1.0f,
                        .half = half,
                        .heads = args.heads,
                        .head_dim = args.head_dim,
                        .interleaved = interleaved,
                        .by_head = FastDivide(static_cast<uint32_t>(units))};
  const auto grid = static_cast<unsigned>(args.rows);
  const size_t shared = static_cast<size_t>(half) * sizeof(float2);
  if (eights) {
    rotary_rows_kernel<true><<<grid, kThreads, shared, at.stream>>>(op);
  } else {
    rotary_rows_kernel<false><<<grid, kThreads, shared, at.stream>>>(op);
  }
  check_launch("rotary_rows_kernel");
}

}  // namespace millrace::cuda
