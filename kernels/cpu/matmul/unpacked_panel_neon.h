// Rows of weights unpacked into memory for the GEMM path on ARM: the scratch for a panel of columns and what
// the two multiplications by tiles (gemm_tile_sdot.h, gemm_tile_smmla.h) share.
//
// sdot    Four rows of weights interleaved by four codes: sdot by a lane of the activations gives one lane
//         per row of weights, so a block of 32 is eight sdot and no reduction.
// smmla   Eight rows in pairs, interleaved by eight codes: smmla multiplies a pair by a pair of activation
//         rows, 2 x 2 outputs. The sum begins at 1.5 * 2^23, whose last bit is worth one: the integer is
//         then read as a float by a subtraction, which any vector unit does, and not by a conversion, which
//         only smmla's units do.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/formats.h"
#include "kernels/cpu/simd/neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/kernel_table.h"
#if !defined(MILLRACE_HAS_DOTPROD)
#error "for targets with the dot product instruction"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline constexpr int kPanelBlocks = 64;  // 2,048 columns: 8 KiB of codes per four rows

#if defined(MILLRACE_HAS_I8MM)
inline constexpr int kTileQuads = 2, kTileLanes = 16;  // of rows; four pairs, each twice
#else
inline constexpr int kTileQuads = 1, kTileLanes = 4;
#endif

// A sum that begins here, 1.5 * 2^23 as a float, is that float plus the integer.
inline constexpr int32_t kFloatOrigin = 0x4b400000;

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

// The sixteen integer scales of a stored block of four rows, to out(half run)[row].
template <class Format, class Out>
inline void unpack_half_scales(const uint8_t* const* rows, Out out) {
  if constexpr (requires { Format::kHalfScalesAt; }) {
    Simd::transpose_bytes16(rows, Format::kHalfScalesAt, out);
  } else {
    int8_t half[4][16];
    for (int r = 0; r < 4; ++r) Format::unpack_halves(rows[r], half[r]);
    for (int i = 0; i < 16; ++i) {
      for (int r = 0; r < 4; ++r) out(i)[r] = half[r][i];
    }
  }
}
struct HalfScales {
  int32_t of[16][4];  // [half run][row]
  template <class Format>
  void unpack(const uint8_t* const* rows) {
    unpack_half_scales<Format>(rows, [&](int i) { return of[i]; });
  }
};

// Rows of weights in the order the multiplication takes them; scales as the lanes of its sums want them.
struct UnpackedPanel {
  int8_t codes[kPanelBlocks][kTileQuads * 128];
  float d[kPanelBlocks][kTileLanes];
  float m[kPanelBlocks][kTileLanes];          // of types with a minimum
  int32_t half[kPanelBlocks][2][kTileLanes];  // scales of the two halves of a run (kHalves)
};

// What a panel of activations multiplies weights' scales by.
struct PanelScales {
  float scale[kMaxRowsPerPass][kPanelBlocks];
  float min[kMaxRowsPerPass][kPanelBlocks];  // scale * sum of codes
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
