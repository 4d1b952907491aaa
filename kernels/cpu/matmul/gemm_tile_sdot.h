// sdot by lanes: four rows of weights by up to eight rows of activations.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/matmul/formats.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/matmul/unpacked_panel_neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#if defined(MILLRACE_HAS_I8MM)
#error "gemm_tile_smmla.h is for targets with the int8 matrix instructions"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Four rows of 16 codes to [4 codes of each row] x 4.
inline void store_interleaved(int8_t* to, int8x16_t a, int8x16_t b, int8x16_t c, int8x16_t d) {
  const int32x4_t a4 = vreinterpretq_s32_s8(a), b4 = vreinterpretq_s32_s8(b), c4 = vreinterpretq_s32_s8(c),
                  d4 = vreinterpretq_s32_s8(d);
  const int32x4_t ac_lo = vzip1q_s32(a4, c4), bd_lo = vzip1q_s32(b4, d4);  // a0 c0 a1 c1
  const int32x4_t ac_hi = vzip2q_s32(a4, c4), bd_hi = vzip2q_s32(b4, d4);
  vst1q_s32(reinterpret_cast<int32_t*>(to), vzip1q_s32(ac_lo, bd_lo));
  vst1q_s32(reinterpret_cast<int32_t*>(to) + 4, vzip2q_s32(ac_lo, bd_lo));
  vst1q_s32(reinterpret_cast<int32_t*>(to) + 8, vzip1q_s32(ac_hi, bd_hi));
  vst1q_s32(reinterpret_cast<int32_t*>(to) + 12, vzip2q_s32(ac_hi, bd_hi));
}

template <class Format, int kRun>
[[gnu::always_inline]] inline void unpack_run(const uint8_t* const* weights, int64_t group, int8_t* to) {
  I8x32 codes[4];
  unroll<4>([&](auto r) {
    codes[r] = Format::template load<kRun>(weights[r], group);
    if constexpr (Format::kOffset != 0) codes[r] = Simd::sub_i8(codes[r], Format::kOffset);
  });
  store_interleaved(to, codes[0].lo, codes[1].lo, codes[2].lo, codes[3].lo);
  store_interleaved(to + 64, codes[0].hi, codes[1].hi, codes[2].hi, codes[3].hi);
}

// One stored block of four rows: runs [b, b + kSubBlocks).
template <class Format>
[[gnu::always_inline]] inline void unpack_quad(const uint8_t* const* weights,
                                               const uint8_t* const* scale_rows, int, int64_t b,
                                               UnpackedPanel& to) {
  const typename Format::Scales scales(scale_rows);
  for (int64_t group = 0; group < (Format::kSubBlocks + 3) / 4; ++group) {
    unpack_run<Format, 0>(weights, group, to.codes[b + 4 * group]);
    if constexpr (Format::kSubBlocks > 1) {
      unpack_run<Format, 1>(weights, group, to.codes[b + 4 * group + 1]);
      unpack_run<Format, 2>(weights, group, to.codes[b + 4 * group + 2]);
      unpack_run<Format, 3>(weights, group, to.codes[b + 4 * group + 3]);
    }
  }
  for (int s = 0; s < Format::kSubBlocks; ++s) {
    Simd::store4(to.d[b + s], scales.d(s));
    if constexpr (Format::kMin) Simd::store4(to.m[b + s], scales.m(s));
  }
  if constexpr (Format::kHalves) {
    unpack_half_scales<Format>(weights, [&](int i) { return to.half[b + i / 2][i % 2]; });
  }
}

// A run of four rows that is interleaved already, and its scales.
inline void store_interleaved_run(int8_t* to, int, const int8x16_t (&codes)[8]) {
  unroll<8>([&](auto i) { vst1q_s8(to + 16 * i, codes[i]); });
}
inline void store_scales(float* to, int, F4 rows) { Simd::store4(to, rows); }
inline void store_half(int32_t* to, int, int32x4_t rows) { vst1q_s32(to, rows); }

// Weights stay in eight registers for a block; each activation row takes two loads, eight sdot, a conversion,
// a multiplication and a fused multiply-add.
template <class Format, int kM>
void sdot_tile(const UnpackedPanel& w, int64_t blocks, const ActivationBlock* const* rows,
               const PanelScales& scales, int64_t m0, int64_t num_rows, float* out, int64_t out_stride,
               bool fresh) {
  F4 acc[kM];
  const ActivationBlock* x[kM];
  unroll<kM>([&](auto m) {
    x[m] = rows[m];
    acc[m] = Simd::zero4();
    if (!fresh) {
      float lanes[4] = {};
      for (int64_t r = 0; r < 4 && r < num_rows; ++r) lanes[r] = out[m * out_stride + r];
      acc[m] = Simd::set4(lanes);
    }
  });
  const int32x4_t origin = vdupq_n_s32(kFloatOrigin);
  const float(*scale)[kPanelBlocks] = scales.scale + m0;
  const float(*min)[kPanelBlocks] = scales.min + m0;
  for (int64_t b = 0; b < blocks; ++b) {
    int8x16_t c[8];
    unroll<8>([&](auto i) { c[i] = vld1q_s8(w.codes[b] + 16 * i); });
    const F4 d = Simd::set4(w.d[b]);
    unroll<kM>([&](auto m) {
      const int8x16_t lo = vld1q_s8(x[m][b].q), hi = vld1q_s8(x[m][b].q + 16);
      int32x4_t first = vdotq_laneq_s32(Format::kHalves ? Simd::zero_sum() : origin, c[0], lo, 0);
      first = vdotq_laneq_s32(first, c[1], lo, 1);
      first = vdotq_laneq_s32(first, c[2], lo, 2);
      first = vdotq_laneq_s32(first, c[3], lo, 3);
      int32x4_t isum = Format::kHalves ? Simd::zero_sum() : first;
      isum = vdotq_laneq_s32(isum, c[4], hi, 0);
      isum = vdotq_laneq_s32(isum, c[5], hi, 1);
      isum = vdotq_laneq_s32(isum, c[6], hi, 2);
      isum = vdotq_laneq_s32(isum, c[7], hi, 3);
      if constexpr (Format::kHalves) {
        isum = vmlaq_s32(vmulq_s32(first, vld1q_s32(w.half[b][0])), isum, vld1q_s32(w.half[b][1]));
      }
      const F4 sum = Format::kHalves ? Simd::to_float4(isum)
                                     : vsubq_f32(vreinterpretq_f32_s32(isum), vreinterpretq_f32_s32(origin));
      acc[m] = Simd::fma4(sum, Simd::mul4(d, scale[m][b]), acc[m]);
      if constexpr (Format::kMin) acc[m] = Simd::fma4(Simd::set4(w.m[b]), min[m][b], acc[m]);
    });
  }
  unroll<kM>([&](auto m) { store_lanes(out + m * out_stride, acc[m], num_rows); });
}

template <class Format>
void multiply_panel(const UnpackedPanel& w, int64_t blocks, const Panel& x, int64_t at,
                    const PanelScales& scales, int64_t num_m, int64_t num_rows, float* out,
                    int64_t out_stride, bool fresh) {
  const auto tiles = [&](auto count, int64_t m) {
    constexpr int kM = decltype(count){};
    for (; m + kM <= num_m; m += kM) {
      const ActivationBlock* rows[kM];
      for (int i = 0; i < kM; ++i) {
        rows[i] = reinterpret_cast<const ActivationBlock*>(panel_row(x, m + i)) + at;
      }
      sdot_tile<Format, kM>(w, blocks, rows, scales, m, num_rows, out + m * out_stride, out_stride, fresh);
    }
    return m;
  };
  tiles(Index<1>{}, tiles(Index<2>{}, tiles(Index<4>{}, tiles(Index<8>{}, 0))));
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
