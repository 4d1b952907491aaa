// Rotary position embedding of rows, one CTA per row: its angles are computed once for all heads. Roofline:
// memory.
#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

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

// The angle in double, in turns without the whole ones: at position 100,000 a float32 angle is off by
// thousandths.
__device__ inline float2 cos_sin_at(const RotaryParams& op, int32_t position, int i) {
  constexpr double kTurns = 0.15915494309189535;  // of a radian
  const double turns = static_cast<double>(position) * static_cast<double>(op.inv_freq[i]) * kTurns;
  float s, c;
  sincospif(2.0f * static_cast<float>(turns - rint(turns)), &s, &c);
  return {c * op.magnitude, s * op.magnitude * op.sign};
}

__device__ inline void turn(float& a, float& b, float2 by) {
  const float a0 = a, b0 = b;
  a = fmaf(a0, by.x, -(b0 * by.y));
  b = fmaf(b0, by.x, a0 * by.y);
}

// Eight pairs (i, i + half), eight columns of four pairs (2 i, 2 i + 1), or eight columns that are not
// turned: on its way before the angles are there.
struct Eights {
  int64_t col;
  int unit;
  Raw8 a, b;  // b: where there are two halves
};
template <Form kForm>
__device__ inline Eights load_eights(const RotaryParams& op, int64_t row, uint32_t idx) {
  const uint32_t head = op.by_head(idx);
  Eights e{};
  e.unit = static_cast<int>(idx - head * op.by_head.divisor);
  const int turned = op.interleaved ? op.half / 4 : op.half / 8;
  e.col = static_cast<int64_t>(head) * op.head_dim + e.unit * kColumns;
  if (e.unit >= turned) {
    e.col += 2 * op.half - turned * kColumns;
  } else if (!op.interleaved) {
    e.b = load8<kForm>(op.x, row, e.col + op.half, kColumns);
  }
  e.a = load8<kForm>(op.x, row, e.col, kColumns);
  return e;
}
template <Form kForm>
__device__ inline void turn_eights(const RotaryParams& op, int64_t row, const Eights& e,
                                   const float2* cos_sin) {
  const int turned = op.interleaved ? op.half / 4 : op.half / 8;
  Values8 a = to_float<kForm>(op.x, e.a);
  if (e.unit < turned && op.interleaved) {
#pragma unroll
    for (int i = 0; i < 4; ++i) turn(a.v[2 * i], a.v[2 * i + 1], cos_sin[e.unit * 4 + i]);
  } else if (e.unit < turned) {
    Values8 b = to_float<kForm>(op.x, e.b);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) turn(a.v[i], b.v[i], cos_sin[e.unit * kColumns + i]);
    store8<kForm>(op.y, row, e.col + op.half, kColumns, b);
  }
  store8<kForm>(op.y, row, e.col, kColumns, a);
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

// Units are eight columns or pairs of them (kForm), or single pairs (rotary_ones_kernel).
template <Form kForm>
__global__ void __launch_bounds__(kThreads, kForm == Form::kBf16 ? 6 : 1)
    rotary_eights_kernel(RotaryParams op) {
  extern __shared__ float2 cos_sin[];  // [half]: cos and sin, times magnitude
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.x;
  const auto units = static_cast<uint32_t>(op.heads) * op.by_head.divisor;
  uint32_t idx = threadIdx.x;
  Eights first{};
  if (idx < units) first = load_eights<kForm>(op, row, idx);
  const int32_t position = op.positions[row];
  for (int i = threadIdx.x; i < op.half; i += kThreads) cos_sin[i] = cos_sin_at(op, position, i);
  __syncthreads();  // all angles are there before any is used
  if (idx < units) turn_eights<kForm>(op, row, first, cos_sin);
  for (idx += kThreads; idx < units; idx += kThreads) {
    turn_eights<kForm>(op, row, load_eights<kForm>(op, row, idx), cos_sin);
  }
}

__global__ void __launch_bounds__(kThreads) rotary_ones_kernel(RotaryParams op) {
  extern __shared__ float2 cos_sin[];  // as above
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.x;
  const int32_t position = op.positions[row];
  for (int i = threadIdx.x; i < op.half; i += kThreads) cos_sin[i] = cos_sin_at(op, position, i);
  __syncthreads();  // all angles are there before any is used
  const auto units = static_cast<uint32_t>(op.heads) * op.by_head.divisor;
  for (uint32_t i = threadIdx.x; i < units; i += kThreads) {
    const uint32_t head = op.by_head(i), unit = i - head * op.by_head.divisor;
    turn_one(op, row, static_cast<int>(head), static_cast<int>(unit), cos_sin);
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
  const auto kernel = !eights                                ? rotary_ones_kernel
                      : is_plain_bf16(x) && is_plain_bf16(y) ? rotary_eights_kernel<Form::kBf16>
                                                             : rotary_eights_kernel<Form::kAny>;
  launch_overlapping("rotary kernel", 1, kernel, dim3(grid), kThreads, shared, at, op);
}

}  // namespace millrace::cuda
