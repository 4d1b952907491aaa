// GEMM on ARM with the dot product instruction: weights are unpacked once per panel of 2,048 columns into a
// scratch of the first-level cache, interleaved so that no reduction is needed, and multiplied with every row
// of activations there. Roofline: sdot or smmla, less the conversion and two multiplications that each block
// of 32 costs an output.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/matmul/unpacked_panel_neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#if defined(MILLRACE_HAS_I8MM)
#include "kernels/cpu/matmul/gemm_tile_smmla.h"
#else
#include "kernels/cpu/matmul/gemm_tile_sdot.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Rows of activations from which unpacking weights into memory is cheaper than unpacking them in registers
// for every eight rows again.
inline constexpr int64_t kMinGemmRows = 12;

// Weights of four interleaved rows (gemv_interleaved_neon.h): unpacked where they lie, four rows at a time.
template <class Interleaved>
void unpack_interleaved_four(const uint8_t* from, int64_t ahead, int quad, int64_t blocks,
                             UnpackedPanel& to) {
  for (int64_t b = 0; b < blocks; b += 8, from += Interleaved::kBlockBytes) {
    for (int64_t line = 0; line < Interleaved::kBlockBytes; line += 64) {
      __builtin_prefetch(from + ahead + line, 0, 2);
    }
    const typename Interleaved::Scales scales(from);
    constexpr float kFactor = Interleaved::Scales::kFactor;
    unroll<8>([&](auto run) {
      int8x16_t codes[8];
      unroll<8>([&](auto i) {
        codes[i] = Interleaved::template code<run, i>(from);
        if constexpr (Interleaved::kOffset != 0)
          codes[i] = vsubq_s8(codes[i], vdupq_n_s8(Interleaved::kOffset));
      });
      store_interleaved_run(to.codes[b + run], quad, codes);
      store_scales(to.d[b + run], quad, vmulq_n_f32(scales.template scale_of<run>(), kFactor));
      if constexpr (Interleaved::kMin) {
        store_scales(to.m[b + run], quad, vmulq_n_f32(scales.template min_of<run>(), kFactor));
      }
      if constexpr (Interleaved::kHalves) {
        unroll<2>([&](auto i) { store_half(to.half[b + run][i], quad, scales.template half<run, i>()); });
      }
    });
  }
}

template <class Interleaved>
void unpack_interleaved(const MatrixView& w, int64_t row, int64_t rows, int64_t at, int64_t blocks,
                        UnpackedPanel& to) {
  unroll<kTileQuads>([&](auto quad) {
    const int64_t four = row + (4 * quad < rows ? 4 * quad : 0);  // past `rows` any four will do
    unpack_interleaved_four<Interleaved>(w.data + four * w.row_bytes + at * Interleaved::kBlockBytes,
                                         4 * kTileQuads * w.row_bytes, quad, blocks, to);
  });
}

// Rows [row, row + 4 * kTileQuads) of the panel of `blocks` runs of 32 that begins at stored block `at`.
template <class Format>
void unpack_panel(const MatrixView& w, int64_t row, int64_t rows, int64_t at, int64_t blocks,
                  UnpackedPanel& to) {
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
      unpack_quad<Format>(weights + 4 * quad, (Format::kSplit ? scales : weights) + 4 * quad, quad, b, to);
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
void gemm(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m, float* out,
          int64_t out_stride) {
  constexpr int64_t kRows = 4 * kTileQuads;
  const int64_t all_blocks = w.cols / kQuantBlock;
  alignas(64) UnpackedPanel unpacked;
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
        if constexpr (requires { Format::kInterleaved; }) {
          unpack_interleaved<Format>(w, first + r, num_rows - r, at / Format::kSubBlocks, blocks, unpacked);
        } else {
          unpack_panel<Format>(w, first + r, num_rows - r, at / Format::kSubBlocks, blocks, unpacked);
        }
        multiply_panel<Format>(unpacked, blocks, rows_of_pass, at, scales, pass, num_rows - r,
                               out + m * out_stride + r, out_stride, at == 0);
      }
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
