#include "kernels/cpu/attention/rotary.h"

#include <algorithm>
#include <cmath>

namespace millrace::cpu {
namespace {

constexpr int64_t kRotaryRowsPerTask = 16;

struct CosSin {
  float cosine, sine;
};
CosSin angle_at(const Rotary& rotary, int32_t position, int64_t i) {
  const double angle = static_cast<double>(position) * rotary.inv_freq[i];
  return {static_cast<float>(std::cos(angle) * rotary.magnitude),
          static_cast<float>(std::sin(angle) * rotary.magnitude)};
}

void rotate_pair(float& a, float& b, CosSin by) {
  const float a0 = a, b0 = b;
  a = a0 * by.cosine - b0 * by.sine;
  b = b0 * by.cosine + a0 * by.sine;
}

}  // namespace

void query_growth(const QueryGrowth& growth, const int32_t* positions, int64_t rows, float* factors) {
  for (int64_t row = 0; row < rows; ++row) {
    const double position = positions[row] + growth.offset;
    factors[row] = static_cast<float>(1.0 + growth.scale * std::log1p(std::floor(position / growth.every)));
  }
}

void rotary_angles(const Context& ctx, const Rotary& rotary, const int32_t* positions, int64_t rows,
                   float* cosines, float* sines) {
  const auto half = static_cast<int64_t>(rotary.inv_freq.size());
  ctx.pool.parallel_for(rows, kRotaryRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < half; ++i) {
        const CosSin at = angle_at(rotary, positions[row], i);
        cosines[row * half + i] = at.cosine;
        sines[row * half + i] = at.sine;
      }
    }
  });
}

void rotary_angles_on_axes(const Context& ctx, const Rotary& rotary, std::span<const uint8_t> axes,
                           const int32_t* positions, int64_t rows, float* cosines, float* sines) {
  const auto half = static_cast<int64_t>(rotary.inv_freq.size());
  ctx.pool.parallel_for(rows, kRotaryRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < half; ++i) {
        const int64_t axis = axes.empty() ? 0 : axes[static_cast<size_t>(i)];
        const CosSin at = angle_at(rotary, positions[3 * row + axis], i);
        cosines[row * half + i] = at.cosine;
        sines[row * half + i] = at.sine;
      }
    }
  });
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, bool interleaved) {
  for (int64_t i = 0; i < half; ++i) {
    rotate_pair(x[interleaved ? 2 * i : i], x[interleaved ? 2 * i + 1 : i + half], {cosines[i], sines[i]});
  }
}

// An angle at a time for all heads of a row: no table of them is needed.
void rotary_rows(const Context& ctx, const Rotary& rotary, const int32_t* positions, int64_t rows,
                 int64_t heads, int64_t head_dim, float* x, int64_t stride) {
  const auto half = static_cast<int64_t>(rotary.inv_freq.size());
  ctx.pool.parallel_for(rows, kRotaryRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < half; ++i) {
        const CosSin by = angle_at(rotary, positions[row], i);
        const int64_t a = rotary.interleaved ? 2 * i : i, b = rotary.interleaved ? 2 * i + 1 : i + half;
        for (int64_t h = 0; h < heads; ++h) {
          float* head = x + row * stride + h * head_dim;
          rotate_pair(head[a], head[b], by);
        }
      }
    }
  });
}

}  // namespace millrace::cpu
