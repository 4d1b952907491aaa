// GEMV on ARM with the dot product instruction, one to eight rows of activations: four rows of weights are
// read once, front to back, unpacked in registers and thrown away; the integer sums of the four are reduced
// together by addp into one vector with a lane per row. Roofline: memory, for Q8_0; for types of four bits
// the vector units: MXFP4 needs and, ushr, 2 tbl, 2 sdot per 17 bytes (docs/kernels/arm_matmul.md counts the
// slots).
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/matmul/formats.h"
#include "kernels/cpu/matmul/gemv_mxfp4_neon.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/matmul/unpacked_panel_neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <class Format, int kM>
struct Gemv {
  using Scales = typename Format::Scales;
  const uint8_t* weights[4];
  const uint8_t* scales[4];  // of kSplit formats
  const ActivationBlock* x[kM];
  F4 acc[kM];

  template <int kRun>
  [[gnu::always_inline]] void multiply_run(const Scales& block_scales, const HalfScales& halves,
                                           int64_t group) {
    const int64_t run = 4 * group + kRun;
    I8x32 codes[4];
    unroll<4>([&](auto r) { codes[r] = Format::template load<kRun>(weights[r], group); });
    const F4 d = block_scales.d(run);
    unroll<kM>([&](auto m) {
      const ActivationBlock& b = x[m][run];
      const I8x32 a = Simd::load_i8(b.q);
      Simd::I4 isum;
      if constexpr (Format::kHalves) {
        isum = sum_halves(codes, a, halves.of[2 * run], halves.of[2 * run + 1]);
      } else {
        Simd::Partial partial[4];
        unroll<4>([&](auto r) { partial[r] = Simd::template dot<Format::kUnsigned>(codes[r], a); });
        isum = Simd::reduce(partial);
      }
      if constexpr (Format::kOffset != 0) isum = Simd::sub4(isum, Format::kOffset * b.sum);
      const float scale = Format::kDoubled ? 0.5f * b.scale : b.scale;
      acc[m] = Simd::fma4(Simd::to_float4(isum), Simd::mul4(d, scale), acc[m]);
      if constexpr (Format::kMin) {
        acc[m] = Simd::fma4(block_scales.m(run), b.scale * static_cast<float>(b.sum), acc[m]);
      }
    });
  }

  // Two halves of 16 with an integer scale each: reduced over rows first, so that four rows share the
  // multiplications.
  [[gnu::always_inline]] static Simd::I4 sum_halves(const I8x32 (&codes)[4], I8x32 a, const int32_t* first,
                                                    const int32_t* second) {
    Simd::Partial lo[4], hi[4];
    unroll<4>([&](auto r) {
      lo[r] = Simd::dot16(codes[r].lo, a.lo);
      hi[r] = Simd::dot16(codes[r].hi, a.hi);
    });
    return vmlaq_s32(vmulq_s32(Simd::reduce(lo), vld1q_s32(first)), Simd::reduce(hi), vld1q_s32(second));
  }

  [[gnu::always_inline]] void multiply_block() {
    const Scales block_scales(Format::kSplit ? scales : weights);
    HalfScales halves;
    if constexpr (Format::kHalves) halves.template unpack<Format>(weights);
    if constexpr (Format::kSubBlocks == 1) {
      multiply_run<0>(block_scales, halves, 0);
    } else {
      for (int64_t group = 0; group < Format::kSubBlocks / 4; ++group) {
        multiply_run<0>(block_scales, halves, group);
        multiply_run<1>(block_scales, halves, group);
        multiply_run<2>(block_scales, halves, group);
        multiply_run<3>(block_scales, halves, group);
      }
    }
  }

  // One cache line of each row, about: its blocks, and the prefetch of the line that many bytes `ahead`.
  template <int kBlocks>
  [[gnu::always_inline]] void multiply_line(int64_t ahead) {
    unroll<4>([&](auto r) {
      unroll<(Format::kBlockBytes + 63) / 64>(
          [&](auto line) { __builtin_prefetch(weights[r] + ahead + 64 * line); });
    });
    unroll<kBlocks>([&](auto) {
      multiply_block();
      unroll<4>([&](auto r) { weights[r] += Format::kBlockBytes; });
      if constexpr (Format::kSplit) unroll<4>([&](auto r) { scales[r] += 1; });
      unroll<kM>([&](auto m) { x[m] += Format::kSubBlocks; });
    });
  }

  // `ahead`: bytes from these rows to the next ones that will be read, which are prefetched meanwhile: the
  // hardware follows a row well and does not know where the next one begins.
  [[gnu::always_inline]] void run(int64_t blocks, int64_t ahead) {
    unroll<kM>([&](auto m) { acc[m] = Simd::zero4(); });
    constexpr int kPerLine = kM > 1 || Format::kBlockBytes > 34 ? 1 : 68 / Format::kBlockBytes;
    int64_t b = 0;
    for (; b + kPerLine <= blocks; b += kPerLine) multiply_line<kPerLine>(ahead);
    for (; b < blocks; ++b) multiply_line<1>(ahead);
  }
};

template <class Format, int kM>
void gemv_rows(const MatrixView& w, int64_t row, int64_t rows, const Panel& x, int64_t m0, float* out,
               int64_t out_stride) {
  Gemv<Format, kM> gemv;
  unroll<4>([&](auto r) {
    const int64_t at = row + (r < rows ? r : rows - 1);  // a short tile repeats its last row
    gemv.weights[r] = w.data + at * w.row_bytes;
    gemv.scales[r] = Format::kSplit ? w.scales + at * w.scale_row_bytes : nullptr;
  });
  unroll<kM>([&](auto m) { gemv.x[m] = reinterpret_cast<const ActivationBlock*>(panel_row(x, m0 + m)); });
  const int64_t blocks = w.cols / (kQuantBlock * Format::kSubBlocks), ahead = rows > 4 ? 4 * w.row_bytes : 0;
  if constexpr (kHasOwnGemv<Format> && kM == 1) {
    if (blocks >= 2) {
      MxFp4Gemv<Format> mx;
      const int64_t two_tiles = rows > 8 ? 8 * w.row_bytes : 0;
      store_lanes(out, mx.run(gemv.weights, gemv.scales, gemv.x[0], blocks, two_tiles), rows);
      return;
    }
  }
  gemv.run(blocks, ahead);
  unroll<kM>([&](auto m) { store_lanes(out + m * out_stride, gemv.acc[m], rows); });
}

// All rows of the chunk by kM rows of activations, which stay in the first-level cache meanwhile.
template <class Format, int kM>
void gemv_chunk(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t m, float* out,
                int64_t out_stride) {
  for (int64_t r = 0; r < num_rows; r += 4) {
    gemv_rows<Format, kM>(w, first + r, num_rows - r, x, m, out + m * out_stride + r, out_stride);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
