// Matrix products of float weights (F32, F16, BF16) with float32 activations by the 16-lane rule
// (tables/kernel_table.h). Weights are widened into registers; for prompts on x86 once for many rows of
// activations (float_panels.h).
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#if defined(MILLRACE_SIMD_X86)
#include "kernels/cpu/matmul/float_panels.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <class Load, int kR, int kM>
void float_tile(const MatrixView& w, int64_t row, const Panel& x, int64_t m0, float* out,
                int64_t out_stride) {
  using Stored = typename Load::Stored;
  const Stored* weights[kR];
  const float* xs[kM];
  V16 acc[kR][kM];
  unroll<kR>([&](auto r) {
    weights[r] = reinterpret_cast<const Stored*>(w.data + (row + r) * w.row_bytes);
    unroll<kM>([&](auto m) { acc[r][m] = Simd::zero(); });
  });
  unroll<kM>([&](auto m) { xs[m] = reinterpret_cast<const float*>(panel_row(x, m0 + m)); });
  int64_t c = 0;
  for (; c + kLanes <= w.cols; c += kLanes) {
    V16 a[kM];
    unroll<kM>([&](auto m) { a[m] = Simd::load(xs[m] + c); });
    unroll<kR>([&](auto r) {
      const V16 b = Load::load(weights[r] + c);
      unroll<kM>([&](auto m) { acc[r][m] = Simd::fma(b, a[m], acc[r][m]); });
    });
  }
  if (c < w.cols) {
    unroll<kR>([&](auto r) {
      const V16 b = load_tail<Load>(weights[r] + c, w.cols - c);
      unroll<kM>(
          [&](auto m) { acc[r][m] = Simd::fma(b, load_tail<LoadF32>(xs[m] + c, w.cols - c), acc[r][m]); });
    });
  }
  unroll<kR>(
      [&](auto r) { unroll<kM>([&](auto m) { out[m * out_stride + r] = Simd::reduce_sum(acc[r][m]); }); });
}

template <class Load, int kR, int kM>
int64_t float_rows(const MatrixView& w, int64_t first, int64_t r, int64_t num_rows, const Panel& x, int64_t m,
                   float* out, int64_t out_stride) {
  for (; r + kR <= num_rows; r += kR) {
    float_tile<Load, kR, kM>(w, first + r, x, m, out + m * out_stride + r, out_stride);
  }
  return r;
}

template <class Load, int kR, int kM>
void float_pass(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t m, float* out,
                int64_t out_stride) {
  const int64_t r = float_rows<Load, kR, kM>(w, first, 0, num_rows, x, m, out, out_stride);
  float_rows<Load, 1, kM>(w, first, r, num_rows, x, m, out, out_stride);
}

// Tiles as large as the registers hold, then four rows by two and by one.
template <class Load>
void float_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                  float* out, int64_t out_stride) {
  constexpr int kR = Simd::kFloatTileRows, kM = Simd::kFloatTileM;
  int64_t m = 0;
#if defined(MILLRACE_SIMD_X86)
  if (num_m >= 2 * kPanelTileM && x.index == nullptr) {
    const int64_t whole = num_rows / kPanelTileRows * kPanelTileRows;
    m = float_panels<Load>(w, first, whole, x, num_m, out, out_stride);
    for (int64_t i = 0; i < m && whole < num_rows; i += kPanelTileM) {
      float_rows<Load, 1, kPanelTileM>(w, first, whole, num_rows, x, i, out, out_stride);
    }
  }
#endif
  for (; m + kM <= num_m; m += kM) float_pass<Load, kR, kM>(w, first, num_rows, x, m, out, out_stride);
  if constexpr (kM > 2) {
    for (; m + 2 <= num_m; m += 2) float_pass<Load, 4, 2>(w, first, num_rows, x, m, out, out_stride);
  }
  for (; m < num_m; ++m) float_pass<Load, 4, 1>(w, first, num_rows, x, m, out, out_stride);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
