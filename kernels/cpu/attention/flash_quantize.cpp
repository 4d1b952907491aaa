#include "kernels/cpu/attention/flash_quantize.h"

#include <algorithm>
#include <cmath>

#include "base/float_bits.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

constexpr float kLargestE4M3 = 448.0f;
constexpr int32_t kMaxDim = 256;

// The rows that share a scale: of one sequence and head, from `first` on.
struct ScaleGroup {
  int64_t b, h, first, count;
};

void read_row(const mr_flash_quantize_args& args, const ScaleGroup& group, int64_t row, float* to) {
  const mr_flash_tensor& t = args.x;
  const auto* from = static_cast<const uint16_t*>(t.data) + group.b * t.batch_stride + row * t.seq_stride +
                     group.h * t.head_stride;
  for (int32_t d = 0; d < args.dim; ++d) {
    to[d] = args.type == MR_BF16 ? to_float(BFloat16{from[d]}) : to_float(Half{from[d]});
  }
}

// x H / sqrt(n) for every n neighbours, n the largest power of two that divides dim: log2 n steps of sums and
// differences.
void rotate_row(float* x, int32_t dim) {
  const int32_t n = dim & -dim;
  for (int32_t step = 1; step < n; step *= 2) {
    for (int32_t d = 0; d < dim; ++d) {
      if ((d & step) != 0) continue;
      const float a = x[d], b = x[d + step];
      x[d] = a + b;
      x[d + step] = a - b;
    }
  }
  const float by = 1.0f / std::sqrt(static_cast<float>(n));
  for (int32_t d = 0; d < dim; ++d) x[d] *= by;
}

// Rows are read twice: a group of 128 as floats would not fit a thread's stack.
void quantize_group(const mr_flash_quantize_args& args, const ScaleGroup& group, float* scale) {
  float x[kMaxDim];
  float largest = 0.0f;
  const auto load = [&](int64_t row) {
    read_row(args, group, row, x);
    if (args.rotate != 0) rotate_row(x, args.dim);
  };
  for (int64_t r = group.first; r < group.first + group.count; ++r) {
    load(r);
    for (int32_t d = 0; d < args.dim; ++d) largest = std::max(largest, std::fabs(x[d]));
  }
  *scale = largest / kLargestE4M3;
  if (*scale == 0.0f) *scale = 1.0f;
  const mr_flash_tensor& t = args.codes;
  for (int64_t r = group.first; r < group.first + group.count; ++r) {
    if (group.count > 1) load(r);
    uint8_t* to =
        static_cast<uint8_t*>(t.data) + group.b * t.batch_stride + r * t.seq_stride + group.h * t.head_stride;
    for (int32_t d = 0; d < args.dim; ++d) to[d] = to_e4m3(x[d] / *scale);
  }
}

}  // namespace

void flash_quantize(const Context& ctx, const mr_flash_quantize_args& args) {
  const int64_t per = args.rows_per_scale, groups = (args.seq + per - 1) / per;
  ctx.pool.parallel_for(args.batch * groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / groups, g = i % groups, first = g * per;
      for (int64_t h = 0; h < args.heads; ++h) {
        const int64_t at = per == 1 ? (b * args.seq + g) * args.heads + h : (b * args.heads + h) * groups + g;
        quantize_group(args, {b, h, first, std::min(per, args.seq - first)}, args.scales + at);
      }
    }
  });
}

}  // namespace millrace::cpu
