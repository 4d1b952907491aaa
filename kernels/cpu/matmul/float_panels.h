// Prompts by float weights (F32, F16, BF16) on x86, with the 16-lane rule's bits (tables/kernel_table.h).
//
// A tile of sums takes all of the registers, so that whatever else goes through the ports of the
// multiplications is what they lose. So eight rows of weights by up to 640 columns are widened once (20 KiB
// of the first-level cache; six rows of activations are 15 KiB more) for 96 rows of activations, and the
// lanes of a whole tile are added together. Of longer rows the sums wait in memory between two pieces.
//
// Roofline: two fused multiply-adds a cycle. A tile of 4 x 6 outputs by 16 columns is 24 of them beside 10
// loads; widened where it is multiplied it is 8 operations more, and lanes added up a sum at a time take 190
// operations a tile, where 90 do. What is left is the way of the activations from the second-level cache.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#if !defined(MILLRACE_SIMD_X86)
#error "for targets of x86"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

#if defined(MILLRACE_SIMD_AVX512)
constexpr int kPanelTileRows = 4, kPanelTileM = 6;  // 24 registers of sums, 4 of weights, 1 of activations
#else
constexpr int kPanelTileRows = 2, kPanelTileM = 3;  // twelve of eight floats, 3 of weights and activations
#endif
constexpr int kPanelRows = 2 * kPanelTileRows;
constexpr int64_t kPanelCols = 640, kPassM = 96;
static_assert(kPassM % kPanelTileM == 0);

struct FloatPanel {
  alignas(64) float weights[kPanelCols / kLanes][kPanelRows][kLanes];
  alignas(64) float sums[kPassM][kPanelRows][kLanes];  // between two pieces
};

// Columns [first, first + count) of the rows of a tile from `row` on, to those from `at` on; zeros behind the
// last.
template <class Load>
void widen_rows(const MatrixView& w, int64_t row, int64_t first, int64_t count, int at, FloatPanel& panel) {
  const typename Load::Stored* rows[kPanelTileRows];
  unroll<kPanelTileRows>([&](auto r) {
    rows[r] = reinterpret_cast<const typename Load::Stored*>(w.data + (row + r) * w.row_bytes) + first;
  });
  const int64_t whole = count / kLanes;
  for (int64_t g = 0; g < whole; ++g) {
    unroll<kPanelTileRows>(
        [&](auto r) { Simd::store(panel.weights[g][at + r], Load::load(rows[r] + g * kLanes)); });
  }
  if (whole * kLanes == count) return;
  unroll<kPanelTileRows>([&](auto r) {
    Simd::store(panel.weights[whole][at + r],
                load_tail<Load>(rows[r] + whole * kLanes, count - whole * kLanes));
  });
}

using TileSums = V16[kPanelTileRows][kPanelTileM];

#if defined(MILLRACE_SIMD_AVX512)
// out[m * stride + r] = reduce_sum(sums[r][kFirst + m]) for r, m < 4: what a step of the tree adds lies
// beside one another, so that sixteen trees are 15 additions of vectors.
template <int kFirst>
[[gnu::always_inline]] inline void store_four_by_four(const TileSums& sums, float* out, int64_t stride) {
  const auto halves = [](V16 p, V16 q) {  // lanes j and j + 8
    return Simd::add(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee));
  };
  const auto quarters = [](V16 p, V16 q) {  // j and j + 4
    return Simd::add(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
  };
  const auto row = [&](auto r) __attribute__((always_inline)) {
    return quarters(halves(sums[r][kFirst], sums[r][kFirst + 1]),
                    halves(sums[r][kFirst + 2], sums[r][kFirst + 3]));
  };
  const auto pairs = [](V16 p, V16 q) {  // j and j + 2
    const __m512d a = _mm512_castps_pd(p), b = _mm512_castps_pd(q);
    return Simd::add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const V16 p = pairs(row(Index<0>{}), row(Index<1>{})), q = pairs(row(Index<2>{}), row(Index<3>{}));
  const V16 all = Simd::add(_mm512_shuffle_ps(p, q, 0x88), _mm512_shuffle_ps(p, q, 0xdd));  // 0 and 1
  _mm_storeu_ps(out, _mm512_castps512_ps128(all));
  _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(all, 1));
  _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(all, 2));
  _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(all, 3));
}

// The first four rows of activations and the last four: two are written twice.
[[gnu::always_inline]] inline void store_tile(const TileSums& sums, float* out, int64_t stride) {
  static_assert(kPanelTileRows == 4 && kPanelTileM == 6);
  store_four_by_four<0>(sums, out, stride);
  store_four_by_four<2>(sums, out + 2 * stride, stride);
}
#else
[[gnu::always_inline]] inline void store_tile(const TileSums& sums, float* out, int64_t stride) {
  unroll<kPanelTileRows>([&](auto r) {
    unroll<kPanelTileM>([&](auto m) { out[m * stride + r] = Simd::reduce_sum(sums[r][m]); });
  });
}
#endif

// What is multiplied of a panel: `count` columns, the rows' first, their last or both.
struct PanelPiece {
  int64_t count;
  bool first, last;
};

// The rows of a tile from `at` on by rows of activations that lie x_stride floats apart, the m-th of a pass
// and those behind it. Not inlined: the compiler would keep its caller's numbers in registers and sums in
// memory.
[[gnu::noinline]] void panel_tile(FloatPanel& panel, int at, const PanelPiece& piece, const float* x,
                                  int64_t x_stride, int64_t m, float* out, int64_t out_stride) {
  TileSums acc;
  const auto each = [](auto body) __attribute__((always_inline)) {
    unroll<kPanelTileRows>([&](auto r) { unroll<kPanelTileM>([&](auto i) { body(r, i); }); });
  };
  if (piece.first) {
    each([&](auto r, auto i) { acc[r][i] = Simd::zero(); });
  } else {
    each([&](auto r, auto i) { acc[r][i] = Simd::load(panel.sums[m + i][at + r]); });
  }
  const float* weights = panel.weights[0][at];
  const auto multiply = [&](auto load) __attribute__((always_inline)) {
    V16 b[kPanelTileRows];
    unroll<kPanelTileRows>([&](auto r) { b[r] = Simd::load(weights + r * kLanes); });
    unroll<kPanelTileM>([&](auto i) {
      const V16 a = load(x + i * x_stride);
      unroll<kPanelTileRows>([&](auto r) { acc[r][i] = Simd::fma(b[r], a, acc[r][i]); });
    });
  };
  const int64_t left = piece.count % kLanes;
  for (const float* end = x + piece.count - left; x < end; x += kLanes, weights += kPanelRows * kLanes) {
    multiply([](const float* p) { return Simd::load(p); });
  }
  if (left > 0) multiply([&](const float* p) { return load_tail<LoadF32>(p, left); });
  if (piece.last) return store_tile(acc, out, out_stride);
  each([&](auto r, auto i) { Simd::store(panel.sums[m + i][at + r], acc[r][i]); });
}

// Rows of activations [m0, m0 + num_m), whole tiles, kPassM at most, by `rows` rows of weights, whole tiles
// too.
template <class Load>
void panel_pass(const MatrixView& w, int64_t row, int64_t rows, const Panel& x, int64_t m0, int64_t num_m,
                float* out, int64_t out_stride, FloatPanel& panel) {
  const int64_t pieces = (w.cols + kPanelCols - 1) / kPanelCols, x_stride = x.row_bytes / int64_t{4};
  const int64_t groups = (w.cols + kLanes - 1) / kLanes, per_piece = (groups + pieces - 1) / pieces * kLanes;
  for (int64_t r = 0; r < rows; r += kPanelRows) {
    const int64_t count = rows - r < kPanelRows ? kPanelTileRows : kPanelRows;
    for (int64_t c = 0; c < w.cols; c += per_piece) {
      const int64_t cols = w.cols - c < per_piece ? w.cols - c : per_piece;
      const PanelPiece piece{cols, c == 0, c + cols == w.cols};
      for (int at = 0; at < count; at += kPanelTileRows) {
        widen_rows<Load>(w, row + r + at, c, cols, at, panel);
      }
      for (int64_t m = 0; m < num_m; m += kPanelTileM) {
        const float* from = reinterpret_cast<const float*>(panel_row(x, m0 + m)) + c;
        for (int at = 0; at < count; at += kPanelTileRows) {
          panel_tile(panel, at, piece, from, x_stride, m, out + m * out_stride + r + at, out_stride);
        }
      }
    }
  }
}

// Rows [first, first + rows) of weights, whole tiles, by as many rows of activations as make whole tiles;
// says how many those are. x has no index.
template <class Load>
int64_t float_panels(const MatrixView& w, int64_t first, int64_t rows, const Panel& x, int64_t num_m,
                     float* out, int64_t out_stride) {
  const int64_t all_m = num_m / kPanelTileM * kPanelTileM;
  FloatPanel panel;
  for (int64_t m = 0; m < all_m; m += kPassM) {
    const int64_t count = all_m - m < kPassM ? all_m - m : kPassM;
    panel_pass<Load>(w, first, rows, x, m, count, out + m * out_stride, out_stride, panel);
  }
  return all_m;
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
