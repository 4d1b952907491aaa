// smmla: eight rows of weights in four pairs by two pairs of activation rows.
//
// In cycles of Neoverse-V1 (four vector units, smmla on two of them): a block of 32 of the tile is 32 smmla,
// 16 cycles, and 8 x (subtract, multiply, fused multiply-add) plus 8 zip, 32 operations for the other two
// units: 16 cycles beside them.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/matmul/formats.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/matmul/unpacked_panel_neon.h"
#include "kernels/cpu/simd/neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#if !defined(MILLRACE_HAS_I8MM)
#error "for targets with the int8 matrix instructions"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Codes lie [8 columns][pair of rows][2][8]; the two rows of a pair adjacent, as smmla wants them.
template <class Format, int kRun>
[[gnu::always_inline]] inline void unpack_run(const uint8_t* const* weights, int64_t group, int quad,
                                              int8_t* to) {
  unroll<2>([&](auto pair) {
    I8x32 codes[2];
    unroll<2>([&](auto r) {
      codes[r] = Format::template load<kRun>(weights[2 * pair + r], group);
      if constexpr (Format::kOffset != 0) codes[r] = Simd::sub_i8(codes[r], Format::kOffset);
    });
    const auto zip = [&](int8x16_t a, int8x16_t b, int8_t* at) {
      const int64x2_t a2 = vreinterpretq_s64_s8(a), b2 = vreinterpretq_s64_s8(b);
      vst1q_s8(at, vreinterpretq_s8_s64(vzip1q_s64(a2, b2)));
      vst1q_s8(at + 64, vreinterpretq_s8_s64(vzip2q_s64(a2, b2)));
    };
    int8_t* at = to + 16 * (2 * quad + pair);
    zip(codes[0].lo, codes[1].lo, at);
    zip(codes[0].hi, codes[1].hi, at + 128);
  });
}

// Lanes of four rows to those of two pairs, each pair twice: r0 r1 r0 r1, r2 r3 r2 r3.
inline void store_pairs(float* to, F4 rows) {
  const float64x2_t pairs = vreinterpretq_f64_f32(rows);
  vst1q_f32(to, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 0)));
  vst1q_f32(to + 4, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 1)));
}

inline void store_scales(float* to, int quad, F4 rows) { store_pairs(to + 8 * quad, rows); }
inline void store_half(int32_t* to, int quad, int32x4_t rows) {
  const int64x2_t pairs = vreinterpretq_s64_s32(rows);
  vst1q_s32(to + 8 * quad, vreinterpretq_s32_s64(vdupq_laneq_s64(pairs, 0)));
  vst1q_s32(to + 8 * quad + 4, vreinterpretq_s32_s64(vdupq_laneq_s64(pairs, 1)));
}
// A run of four rows that lies by fours of columns: two of them make eight columns of two pairs of rows.
inline void store_interleaved_run(int8_t* to, int quad, const int8x16_t (&codes)[8]) {
  unroll<4>([&](auto k) {
    const int32x4_t a = vreinterpretq_s32_s8(codes[2 * k]), b = vreinterpretq_s32_s8(codes[2 * k + 1]);
    int8_t* at = to + 64 * k + 32 * quad;
    vst1q_s8(at, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
    vst1q_s8(at + 16, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
  });
}

// One stored block of four rows: runs [b, b + kSubBlocks).
template <class Format>
[[gnu::always_inline]] inline void unpack_quad(const uint8_t* const* weights,
                                               const uint8_t* const* scale_rows, int quad, int64_t b,
                                               UnpackedPanel& to) {
  const typename Format::Scales scales(scale_rows);
  for (int64_t group = 0; group < (Format::kSubBlocks + 3) / 4; ++group) {
    unpack_run<Format, 0>(weights, group, quad, to.codes[b + 4 * group]);
    if constexpr (Format::kSubBlocks > 1) {
      unpack_run<Format, 1>(weights, group, quad, to.codes[b + 4 * group + 1]);
      unpack_run<Format, 2>(weights, group, quad, to.codes[b + 4 * group + 2]);
      unpack_run<Format, 3>(weights, group, quad, to.codes[b + 4 * group + 3]);
    }
  }
  for (int s = 0; s < Format::kSubBlocks; ++s) {
    store_pairs(to.d[b + s] + 8 * quad, scales.d(s));
    if constexpr (Format::kMin) store_pairs(to.m[b + s] + 8 * quad, scales.m(s));
  }
  if constexpr (Format::kHalves) {
    HalfScales halves;
    halves.template unpack<Format>(weights);
    for (int i = 0; i < 16; ++i) {
      int32_t* at = to.half[b + i / 2][i % 2] + 8 * quad;
      const int64x2_t pairs = vreinterpretq_s64_s32(vld1q_s32(halves.of[i]));
      vst1q_s32(at, vreinterpretq_s32_s64(vdupq_laneq_s64(pairs, 0)));
      vst1q_s32(at + 4, vreinterpretq_s32_s64(vdupq_laneq_s64(pairs, 1)));
    }
  }
}

// x[2 p], x[2 p + 1] to m0 m0 m1 m1.
inline F4 pair_lanes(float first, float second) {
  return vcombine_f32(vdup_n_f32(first), vdup_n_f32(second));
}

// A sum of four holds [activation row of the pair][row of the pair].
template <class Format, int kPairs>
void smmla_tile(const UnpackedPanel& w, int64_t blocks, const ActivationBlock* const* x,
                const PanelScales& scales, int64_t m0, F4 (&acc)[kPairs][4]) {
  const int32x4_t origin = vdupq_n_s32(kFloatOrigin);
  const float(*scale)[kPanelBlocks] = scales.scale + m0;
  const float(*min)[kPanelBlocks] = scales.min + m0;
  for (int64_t b = 0; b < blocks; ++b) {
    int8x16_t a[kPairs][4];  // [pair][8 columns]: both rows of the pair
    unroll<kPairs>([&](auto p) {
      const ActivationBlock &one = x[2 * p][b], &two = x[2 * p + 1][b];
      unroll<2>([&](auto half) {
        const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(one.q + 16 * half)),
                        second = vreinterpretq_s64_s8(vld1q_s8(two.q + 16 * half));
        a[p][2 * half] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
        a[p][2 * half + 1] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
      });
    });
    unroll<4>([&](auto rows) {
      const auto codes = [&](int k) { return vld1q_s8(w.codes[b] + 64 * k + 16 * rows); };
      const int8x16_t c[4] = {codes(0), codes(1), codes(2), codes(3)};
      const F4 d = vld1q_f32(w.d[b] + 4 * rows);
      unroll<kPairs>([&](auto p) {
        F4 sum;
        if constexpr (Format::kHalves) {
          const int32x4_t first = vmmlaq_s32(vmmlaq_s32(Simd::zero_sum(), a[p][0], c[0]), a[p][1], c[1]);
          const int32x4_t second = vmmlaq_s32(vmmlaq_s32(Simd::zero_sum(), a[p][2], c[2]), a[p][3], c[3]);
          sum = Simd::to_float4(vmlaq_s32(vmulq_s32(first, vld1q_s32(w.half[b][0] + 4 * rows)), second,
                                          vld1q_s32(w.half[b][1] + 4 * rows)));
        } else {
          int32x4_t isum = vmmlaq_s32(vmmlaq_s32(origin, a[p][0], c[0]), a[p][1], c[1]);
          isum = vmmlaq_s32(vmmlaq_s32(isum, a[p][2], c[2]), a[p][3], c[3]);
          sum = vsubq_f32(vreinterpretq_f32_s32(isum), vreinterpretq_f32_s32(origin));
        }
        const F4 by = pair_lanes(scale[2 * p][b], scale[2 * p + 1][b]);
        acc[p][rows] = Simd::fma4(sum, Simd::mul4(d, by), acc[p][rows]);
        if constexpr (Format::kMin) {
          acc[p][rows] = Simd::fma4(vld1q_f32(w.m[b] + 4 * rows),
                                    pair_lanes(min[2 * p][b], min[2 * p + 1][b]), acc[p][rows]);
        }
      });
    });
  }
}

// 2 * kPairs rows of activations from m on, of which `count` are wanted; the last is repeated for the others.
template <class Format, int kPairs>
void smmla_rows(const UnpackedPanel& w, int64_t blocks, const Panel& x, int64_t at, const PanelScales& scales,
                int64_t m, int64_t count, int64_t num_rows, float* out, int64_t out_stride, bool fresh) {
  const ActivationBlock* rows[2 * kPairs];
  F4 acc[kPairs][4];
  float sums[2 * kPairs][8] = {};
  const int64_t wanted = num_rows < 8 ? num_rows : 8;
  for (int i = 0; i < 2 * kPairs; ++i) {
    const int64_t own = i < count ? i : count - 1;
    rows[i] = reinterpret_cast<const ActivationBlock*>(panel_row(x, m + own)) + at;
    for (int64_t r = 0; !fresh && r < wanted; ++r) sums[i][r] = out[own * out_stride + r];
  }
  unroll<kPairs>([&](auto p) {
    unroll<4>([&](auto r) {
      acc[p][r] = vcombine_f32(vld1_f32(sums[2 * p] + 2 * r), vld1_f32(sums[2 * p + 1] + 2 * r));
    });
  });
  smmla_tile<Format, kPairs>(w, blocks, rows, scales, m, acc);
  unroll<kPairs>([&](auto p) {
    unroll<4>([&](auto r) {
      vst1_f32(sums[2 * p] + 2 * r, vget_low_f32(acc[p][r]));
      vst1_f32(sums[2 * p + 1] + 2 * r, vget_high_f32(acc[p][r]));
    });
  });
  for (int i = 0; i < 2 * kPairs && i < count; ++i) {
    for (int64_t r = 0; r < wanted; ++r) out[i * out_stride + r] = sums[i][r];
  }
}

template <class Format>
void multiply_panel(const UnpackedPanel& w, int64_t blocks, const Panel& x, int64_t at,
                    const PanelScales& scales, int64_t num_m, int64_t num_rows, float* out,
                    int64_t out_stride, bool fresh) {
  int64_t m = 0;
  for (; m + 4 <= num_m; m += 4) {
    smmla_rows<Format, 2>(w, blocks, x, at, scales, m, 4, num_rows, out + m * out_stride, out_stride, fresh);
  }
  for (; m < num_m; m += 2) {
    const int64_t count = num_m - m < 2 ? 1 : 2;
    smmla_rows<Format, 1>(w, blocks, x, at, scales, m, count, num_rows, out + m * out_stride, out_stride,
                          fresh);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
