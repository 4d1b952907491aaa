// Matrix products of block-quantized weights with int8 activations: one kernel for every format. A tile is
// four rows of weights by kM rows of activations; each block of weights is unpacked once per tile, the
// integer sums of four rows are reduced together into one vector with a lane per row.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/formats.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <class Format, int kM>
struct QuantizedTile {
  const uint8_t* weights[4];
  const uint8_t* scales[4];  // of kSplit formats
  const ActivationBlock* x[kM];
  F4 acc[kM];

  template <int kRun>
  [[gnu::always_inline]] void multiply_run(const typename Format::Scales& block_scales, int64_t group) {
    const int64_t run = 4 * group + kRun;
    I8x32 codes[4];
    unroll<4>([&](auto r) { codes[r] = Format::template load<kRun>(weights[r], group); });
    const F4 d = block_scales.d(run);
    unroll<kM>([&](auto m) {
      const ActivationBlock& b = x[m][run];
      const I8x32 a = Simd::load_i8(b.q);
      Simd::Partial partial[4];
      unroll<4>([&](auto r) {
        if constexpr (Format::kHalves) {
          const int8_t* s = Format::half_scales(block_scales, weights[r], r) + 2 * run;
          partial[r] = Simd::dot_halves(codes[r], a, s[0], s[1]);
        } else {
          partial[r] = Simd::template dot<Format::kUnsigned>(codes[r], a);
        }
      });
      Simd::I4 isum = Simd::reduce(partial);
      if constexpr (Format::kOffset != 0) isum = Simd::sub4(isum, Format::kOffset * b.sum);
      const float scale = Format::kDoubled ? 0.5f * b.scale : b.scale;
      acc[m] = Simd::fma4(Simd::to_float4(isum), Simd::mul4(d, scale), acc[m]);
      if constexpr (Format::kMin) {
        acc[m] = Simd::fma4(block_scales.m(run), b.scale * static_cast<float>(b.sum), acc[m]);
      }
    });
  }

  [[gnu::always_inline]] void multiply_block() {
    const typename Format::Scales block_scales(Format::kSplit ? scales : weights);
    if constexpr (Format::kSubBlocks == 1) {
      multiply_run<0>(block_scales, 0);
    } else {
      for (int64_t group = 0; group < Format::kSubBlocks / 4; ++group) {
        multiply_run<0>(block_scales, group);
        multiply_run<1>(block_scales, group);
        multiply_run<2>(block_scales, group);
        multiply_run<3>(block_scales, group);
      }
    }
  }

  [[gnu::always_inline]] void run(int64_t blocks) {
    unroll<kM>([&](auto m) { acc[m] = Simd::zero4(); });
    for (int64_t b = 0; b < blocks; ++b) {
      multiply_block();
      unroll<4>([&](auto r) { weights[r] += Format::kBlockBytes; });
      if constexpr (Format::kSplit) unroll<4>([&](auto r) { scales[r] += 1; });
      unroll<kM>([&](auto m) { x[m] += Format::kSubBlocks; });
    }
  }
};

template <class Format, int kM>
void quantized_tile(const MatrixView& w, int64_t row, int64_t rows, const Panel& x, int64_t m0, float* out,
                    int64_t out_stride) {
  QuantizedTile<Format, kM> tile;
  unroll<4>([&](auto r) {
    const int64_t at = row + (r < rows ? r : rows - 1);  // a short tile repeats its last row
    tile.weights[r] = w.data + at * w.row_bytes;
    tile.scales[r] = Format::kSplit ? w.scales + at * w.scale_row_bytes : nullptr;
  });
  unroll<kM>([&](auto m) { tile.x[m] = reinterpret_cast<const ActivationBlock*>(panel_row(x, m0 + m)); });
  tile.run(w.cols / (kQuantBlock * Format::kSubBlocks));
  unroll<kM>([&](auto m) {
    float* to = out + m * out_stride;
    if (rows >= 4) {
      Simd::store4(to, tile.acc[m]);
    } else {
      float lanes[4];
      Simd::store4(lanes, tile.acc[m]);
      for (int64_t r = 0; r < rows; ++r) to[r] = lanes[r];
    }
  });
}

// All rows of the chunk by kM rows of activations, which stay in the first-level cache meanwhile.
template <class Format, int kM>
void quantized_rows(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t m,
                    float* out, int64_t out_stride) {
  for (int64_t r = 0; r < num_rows; r += 4) {
    const int64_t rows = num_rows - r < 4 ? num_rows - r : 4;
    quantized_tile<Format, kM>(w, first + r, rows, x, m, out + m * out_stride + r, out_stride);
  }
}

template <class Format>
void quantized_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                      float* out, int64_t out_stride) {
  int64_t m = 0;
  for (; m + 8 <= num_m; m += 8) quantized_rows<Format, 8>(w, first, num_rows, x, m, out, out_stride);
  for (; m + 4 <= num_m; m += 4) quantized_rows<Format, 4>(w, first, num_rows, x, m, out, out_stride);
  for (; m + 2 <= num_m; m += 2) quantized_rows<Format, 2>(w, first, num_rows, x, m, out, out_stride);
  if (m < num_m) quantized_rows<Format, 1>(w, first, num_rows, x, m, out, out_stride);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
