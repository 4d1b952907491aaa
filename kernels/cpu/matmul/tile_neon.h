// The tile path of kernels_quantized_neon.h: weights opened once per panel of columns, then met by every row
// of activations. Included before it.
//
// sdot    Four rows of weights interleaved by four codes: sdot by a lane of the activations gives one lane
//         per row of weights, so a block of 32 is eight sdot and no reduction.
// smmla   Eight rows in pairs, interleaved by eight codes: smmla multiplies a pair by a pair of activation
//         rows, 2 x 2 outputs. The sum begins at 1.5 * 2^23, whose last bit is worth one: the integer is
//         then read as a float by a subtraction, which any vector unit does, and not by a conversion, which
//         only smmla's units do.
#pragma once

// Rows of activations from which opening weights into memory is cheaper than opening them in registers for
// every eight rows again.
inline constexpr int64_t kTileFrom = 12;

inline constexpr int kPanelBlocks = 64;  // 2,048 columns: 8 KiB of codes per four rows

#if defined(__ARM_FEATURE_MATMUL_INT8)
inline constexpr int kTileQuads = 2, kTileLanes = 16;  // of rows; four pairs, each twice
#else
inline constexpr int kTileQuads = 1, kTileLanes = 4;
#endif

// A sum that begins here, 1.5 * 2^23 as a float, is that float plus the integer.
inline constexpr int32_t kFloatOrigin = 0x4b400000;

inline const uint8_t* panel_row(const Panel& x, int64_t m) {
  return x.data + (x.index != nullptr ? x.index[m] : m) * x.row_bytes;
}

// Where rows [row, row + count) begin; past `rows` the last row is repeated.
template <class Format>
inline void row_pointers(const MatrixView& w, int64_t row, int64_t rows, int count, int64_t block,
                         const uint8_t** weights, const uint8_t** scales) {
  for (int r = 0; r < count; ++r) {
    const int64_t at = row + (r < rows ? r : rows - 1);
    weights[r] = w.data + at * w.row_bytes + block * Format::kBlockBytes;
    scales[r] = Format::kSplit ? w.scales + at * w.scale_row_bytes + block : nullptr;
  }
}

inline void store_lanes(float* to, F4 lanes, int64_t rows) {
  if (rows >= 4) {
    Simd::store4(to, lanes);
    return;
  }
  float value[4];
  Simd::store4(value, lanes);
  for (int64_t r = 0; r < rows; ++r) to[r] = value[r];
}

// Q6_K: the sixteen int8 scales of a stored block of four rows.
struct HalfScales {
  int32_t of[16][4];  // [half run][row]
  template <class Format>
  void open(const uint8_t* const* rows) {
    Simd::transpose_bytes16(rows, Format::kHalfScalesAt, [&](int i) { return of[i]; });
  }
};

// Rows of weights in the order the multiplication takes them; scales as the lanes of its sums want them.
struct Opened {
  int8_t codes[kPanelBlocks][kTileQuads * 128];
  float d[kPanelBlocks][kTileLanes];
  float m[kPanelBlocks][kTileLanes];          // of types with a minimum
  int32_t half[kPanelBlocks][2][kTileLanes];  // scales of the two halves of a block, Q6_K
};

// What a panel of activations multiplies weights' scales by.
struct PanelScales {
  float scale[kMaxRowsPerPass][kPanelBlocks];
  float min[kMaxRowsPerPass][kPanelBlocks];  // scale * sum of codes
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "kernels/cpu/matmul/tile_smmla.h"
#else
#include "kernels/cpu/matmul/tile_sdot.h"
#endif

// Weights packed by fours of rows (kernels_packed_neon.h): opened where they lie, four rows at a time.
template <class Packed>
void open_packed_four(const uint8_t* from, int64_t ahead, int quad, int64_t blocks, Opened& to) {
  for (int64_t b = 0; b < blocks; b += 8, from += Packed::kBlockBytes) {
    for (int64_t line = 0; line < Packed::kBlockBytes; line += 64) {
      __builtin_prefetch(from + ahead + line, 0, 2);
    }
    const typename Packed::Scales scales(from);
    constexpr float kFactor = Packed::Scales::kFactor;
    unroll<8>([&](auto run) {
      int8x16_t codes[8];
      unroll<8>([&](auto i) {
        codes[i] = Packed::template code<run, i>(from);
        if constexpr (Packed::kOffset != 0) codes[i] = vsubq_s8(codes[i], vdupq_n_s8(Packed::kOffset));
      });
      store_packed(to.codes[b + run], quad, codes);
      store_scales(to.d[b + run], quad, vmulq_n_f32(scales.template scale_of<run>(), kFactor));
      if constexpr (Packed::kMin) {
        store_scales(to.m[b + run], quad, vmulq_n_f32(scales.template min_of<run>(), kFactor));
      }
      if constexpr (Packed::kHalves) {
        unroll<2>([&](auto i) { store_half(to.half[b + run][i], quad, scales.template half<run, i>()); });
      }
    });
  }
}

template <class Packed>
void open_packed(const MatrixView& w, int64_t row, int64_t rows, int64_t at, int64_t blocks, Opened& to) {
  unroll<kTileQuads>([&](auto quad) {
    const int64_t four = row + (4 * quad < rows ? 4 * quad : 0);  // past `rows` any four will do
    open_packed_four<Packed>(w.data + four * w.row_bytes + at * Packed::kBlockBytes,
                             4 * kTileQuads * w.row_bytes, quad, blocks, to);
  });
}

// Rows [row, row + 4 * kTileQuads) of the panel of `blocks` runs of 32 that begins at stored block `at`.
template <class Format>
void open_panel(const MatrixView& w, int64_t row, int64_t rows, int64_t at, int64_t blocks, Opened& to) {
  const uint8_t *weights[4 * kTileQuads], *scales[4 * kTileQuads];
  row_pointers<Format>(w, row, rows, 4 * kTileQuads, at, weights, scales);
  const int64_t next_rows = 4 * kTileQuads * w.row_bytes;
  for (int64_t b = 0; b < blocks; b += Format::kSubBlocks) {
    // The same columns of the next rows: they arrive while these are multiplied.
    unroll<4 * kTileQuads>([&](auto r) {
      for (int64_t line = 0; line < Format::kBlockBytes; line += 64) {
        __builtin_prefetch(weights[r] + next_rows + line, 0, 2);
      }
    });
    unroll<kTileQuads>([&](auto quad) {
      open_quad<Format>(weights + 4 * quad, (Format::kSplit ? scales : weights) + 4 * quad, quad, b, to);
    });
    for (const uint8_t*& p : weights) p += Format::kBlockBytes;
    if constexpr (Format::kSplit) {
      for (const uint8_t*& p : scales) ++p;
    }
  }
}

template <class Format>
void prepare_scales(const Panel& x, int64_t num_m, int64_t at, int64_t blocks, PanelScales& to) {
  for (int64_t m = 0; m < num_m; ++m) {
    const auto* b = reinterpret_cast<const ActivationBlock*>(panel_row(x, m)) + at;
    for (int64_t i = 0; i < blocks; ++i) {
      to.scale[m][i] = Format::kDoubled ? 0.5f * b[i].scale : b[i].scale;
      if constexpr (Format::kMin) to.min[m][i] = b[i].scale * static_cast<float>(b[i].sum);
    }
  }
}

// Sums live in `out` between panels: a float stored and loaded is the same float.
template <class Format>
void tile_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                 float* out, int64_t out_stride) {
  constexpr int64_t kRows = 4 * kTileQuads;
  const int64_t all_blocks = w.cols / kQuantBlock;
  alignas(64) Opened opened;
  alignas(64) PanelScales scales;
  for (int64_t m = 0; m < num_m; m += kMaxRowsPerPass) {
    const int64_t pass = num_m - m < kMaxRowsPerPass ? num_m - m : kMaxRowsPerPass;
    Panel rows_of_pass = x;
    if (x.index != nullptr) {
      rows_of_pass.index += m;
    } else {
      rows_of_pass.data += m * x.row_bytes;
    }
    for (int64_t at = 0; at < all_blocks; at += kPanelBlocks) {
      const int64_t blocks = all_blocks - at < kPanelBlocks ? all_blocks - at : kPanelBlocks;
      prepare_scales<Format>(rows_of_pass, pass, at, blocks, scales);
      for (int64_t r = 0; r < num_rows; r += kRows) {
        if constexpr (requires { Format::kPacked; }) {
          open_packed<Format>(w, first + r, num_rows - r, at / Format::kSubBlocks, blocks, opened);
        } else {
          open_panel<Format>(w, first + r, num_rows - r, at / Format::kSubBlocks, blocks, opened);
        }
        multiply_panel<Format>(opened, blocks, rows_of_pass, at, scales, pass, num_rows - r,
                               out + m * out_stride + r, out_stride, at == 0);
      }
    }
  }
}
