// Products with Q4_K, Q5_K and Q6_K weights whose rows were interleaved by fours when they were loaded
// (interleave_rows.h has the layouts): four codes of each of four rows lie in one vector, so that sdot by a
// lane of the activations leaves one lane per row and nothing is reduced, and the scales of four rows lie
// side by side. The numbers are those of gemm_int8.h.
//
// Roofline: the vector units. Of four rows and a run of 32, Q4_K takes 8 and or ushr, 8 sdot and 9 for scale,
// minimum and sum: 25 slots, 12.5 cycles of Neoverse-N1 for 72 bytes; Q5_K 41 for 88 bytes, Q6_K 37 for 105.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/matmul/gemm_neon.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/matmul/unpacked_panel_neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#include "kernels/quant/blocks.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// ---------------------------------------------------------------- scales

// Q4_K, Q5_K: a 6-bit scale is left as it is, in bits 16 to 21 of a float: a subnormal, scale * 2^-133.
// d * 2^112 makes of it d * scale * 2^-21, exactly, and the activations' side has the 2^21. So a scale needs
// no conversion, and every product and sum is what it was (activations below 2^100 are meant).
struct SixBitScales {
  static constexpr float kFactor = 0x1p21f;
  uint8x16_t scale[2], min[2];  // bytes [row][run of four]
  F4 d, dmin;                   // d * 2^112, -dmin * 2^112

  explicit SixBitScales(const uint8_t* p) {
    const float16x8_t both = vreinterpretq_f16_u8(vld1q_u8(p));
    d = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(both)), 0x1p112f);
    dmin = vmulq_n_f32(vcvt_high_f32_f16(both), -0x1p112f);
    const uint8x16_t w0 = vld1q_u8(p + 16), w1 = vld1q_u8(p + 32), w2 = vld1q_u8(p + 48);
    const uint8x16_t six = vdupq_n_u8(63), high = vdupq_n_u8(0x30);
    scale[0] = vandq_u8(w0, six);
    min[0] = vandq_u8(w1, six);
    scale[1] = vbslq_u8(high, vshrq_n_u8(w0, 2), vandq_u8(w2, vdupq_n_u8(15)));
    min[1] = vbslq_u8(high, vshrq_n_u8(w1, 2), vshrq_n_u8(w2, 4));
  }
  // Byte kByte of each word to bits 16 to 23.
  template <int kByte>
  static F4 pick(uint8x16_t bytes) {
    constexpr uint32_t kNone = 0xff00ffffu;
    const uint32x4_t at = {kNone | kByte << 16, kNone | (4 + kByte) << 16, kNone | (8 + kByte) << 16,
                           kNone | (12 + kByte) << 16};
    return vreinterpretq_f32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(at)));
  }
  template <int kRun>
  F4 scale_of() const {
    return vmulq_f32(pick<kRun % 4>(scale[kRun / 4]), d);
  }
  template <int kRun>
  F4 min_of() const {
    return vmulq_f32(pick<kRun % 4>(min[kRun / 4]), dmin);
  }
};

// Q6_K: an f16 scale per block and int8 ones per 16.
struct HalfRunScales {
  static constexpr float kFactor = 1.0f;
  const uint8_t* halves;
  F4 d;

  explicit HalfRunScales(const uint8_t* p) : halves(p + 768) {
    d = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 832)));
  }
  template <int kRun>
  F4 scale_of() const {
    return d;
  }
  template <int kRun, int kHalf>
  int32x4_t half() const {  // runs in pairs share a load
    const int8x16_t two_runs = vreinterpretq_s8_u8(vld1q_u8(halves + 16 * (kRun / 2)));
    const int16x8_t run = kRun % 2 == 0 ? vmovl_s8(vget_low_s8(two_runs)) : vmovl_high_s8(two_runs);
    return kHalf == 0 ? vmovl_s16(vget_low_s16(run)) : vmovl_high_s16(run);
  }
};

// ---------------------------------------------------------------- formats

// code<kRun, kColumns>(block): columns 4 kColumns .. + 3 of run kRun of four rows.
struct InterleavedQ4_K {
  static constexpr int kBlockBytes = 4 * sizeof(q::BlockQ4_K);
  static constexpr int kSubBlocks = 8, kOffset = 0;
  static constexpr bool kInterleaved = true, kMin = true, kHalves = false, kDoubled = false;
  using Scales = SixBitScales;
  template <int kRun, int kColumns>
  [[gnu::always_inline]] static int8x16_t code(const uint8_t* block) {
    const uint8x16_t v = vld1q_u8(block + 64 + 128 * (kRun / 2) + 16 * kColumns);
    return vreinterpretq_s8_u8(kRun % 2 == 0 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4));
  }
};

struct InterleavedQ5_K {
  static constexpr int kBlockBytes = 4 * sizeof(q::BlockQ5_K);
  static constexpr int kSubBlocks = 8, kOffset = 0;
  static constexpr bool kInterleaved = true, kMin = true, kHalves = false, kDoubled = false;
  using Scales = SixBitScales;
  template <int kRun, int kColumns>
  [[gnu::always_inline]] static int8x16_t code(const uint8_t* block) {
    const uint8x16_t v = vld1q_u8(block + 192 + 128 * (kRun / 2) + 16 * kColumns),
                     h = vld1q_u8(block + 64 + 16 * kColumns);
    const uint8x16_t four = kRun % 2 == 0 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4);
    uint8x16_t fifth = h;  // bit kRun, moved to bit 4
    if constexpr (kRun < 4) fifth = vshlq_n_u8(h, 4 - kRun);
    if constexpr (kRun > 4) fifth = vshrq_n_u8(h, kRun - 4);
    return vreinterpretq_s8_u8(vbslq_u8(vdupq_n_u8(0x10), fifth, four));
  }
};

// Codes are left unsigned, 32 more than the values.
struct InterleavedQ6_K {
  static constexpr int kBlockBytes = 4 * sizeof(q::BlockQ6_K);
  static constexpr int kSubBlocks = 8, kOffset = 32;
  static constexpr bool kInterleaved = true, kMin = false, kHalves = true, kDoubled = false;
  using Scales = HalfRunScales;
  // Shifts that insert make two bytes into one.
  template <int kRun, int kColumns>
  [[gnu::always_inline]] static int8x16_t code(const uint8_t* block) {
    const uint8x16_t v = vld1q_u8(block + 256 * (kRun / 4) + 128 * (kRun % 2) + 16 * kColumns),
                     h = vld1q_u8(block + 512 + 128 * (kRun / 4) + 16 * kColumns);
    uint8x16_t six;
    if constexpr (kRun % 4 == 0) {
      six = vbslq_u8(vdupq_n_u8(0x30), vshlq_n_u8(h, 4), vandq_u8(v, vdupq_n_u8(15)));
    } else if constexpr (kRun % 4 == 1) {
      six = vbslq_u8(vdupq_n_u8(0x30), vshlq_n_u8(h, 2), vandq_u8(v, vdupq_n_u8(15)));
    } else if constexpr (kRun % 4 == 2) {
      six = vbslq_u8(vdupq_n_u8(0x30), h, vshrq_n_u8(v, 4));
    } else {
      six = vsriq_n_u8(vshrq_n_u8(h, 2), v, 4);
    }
    return vreinterpretq_s8_u8(six);
  }
};

// ---------------------------------------------------------------- one to four activation rows

// Runs of 32 that a pass over rows takes at most: sums of longer rows rest in `out` meanwhile.
inline constexpr int64_t kRunsPerPass = 512;

// What an activation row brings to each run, made once for all rows of weights.
template <class Interleaved>
struct RunFactors {
  float scale[kRunsPerPass];                                     // times Scales::kFactor
  float min[kRunsPerPass];                                       // scale * sum of codes, times the same
  int32_t start[Interleaved::kHalves ? kRunsPerPass : 1][2][4];  // where sums begin

  void prepare(const ActivationBlock* x, int64_t runs) {
    constexpr float kFactor = Interleaved::Scales::kFactor;
    if constexpr (!Interleaved::kHalves) vst1q_s32(start[0][0], vdupq_n_s32(kFloatOrigin));
    for (int64_t i = 0; i < runs; ++i) {
      scale[i] = kFactor * x[i].scale;
      if constexpr (Interleaved::kMin) min[i] = kFactor * (x[i].scale * static_cast<float>(x[i].sum));
      if constexpr (Interleaved::kHalves) {
        const int32_t first = vaddlvq_s8(vld1q_s8(x[i].q));
        vst1q_s32(start[i][0], vdupq_n_s32(-Interleaved::kOffset * first));
        vst1q_s32(start[i][1], vdupq_n_s32(-Interleaved::kOffset * (x[i].sum - first)));
      }
    }
  }
};

// A sum begins at what a load brings: compilers would keep it in a register and copy it, which takes a slot.
[[gnu::always_inline]] inline int32x4_t load_start(const int32_t (&from)[4]) {
  int32x4_t sum;
  asm volatile("ldr %q0, %1" : "=w"(sum) : "m"(from));
  return sum;
}

template <class Interleaved, int kM>
struct InterleavedGemv {
  using Scales = typename Interleaved::Scales;
  const uint8_t* weights;
  const ActivationBlock* x[kM];
  const RunFactors<Interleaved>* factors;  // [kM]
  F4 acc[kM];

  // Half a run of activations by half a run of four rows.
  template <int kRun, int kHalf>
  [[gnu::always_inline]] static int32x4_t dot_half(int32x4_t sum, const int8x16_t* c, int8x16_t a) {
    sum = vdotq_laneq_s32(sum, c[4 * kHalf], a, 0);
    sum = vdotq_laneq_s32(sum, c[4 * kHalf + 1], a, 1);
    sum = vdotq_laneq_s32(sum, c[4 * kHalf + 2], a, 2);
    return vdotq_laneq_s32(sum, c[4 * kHalf + 3], a, 3);
  }

  // Run kRun of a block, `run` of the pass.
  template <int kRun>
  [[gnu::always_inline]] void multiply_run(const Scales& s, int64_t run) {
    int8x16_t c[8];
    unroll<8>([&](auto i) { c[i] = Interleaved::template code<kRun, i>(weights); });
    const F4 d = s.template scale_of<kRun>();
    unroll<kM>([&](auto m) {
      const RunFactors<Interleaved>& f = factors[m];
      const I8x32 a = Simd::load_i8(x[m][kRun].q);
      F4 sum;
      if constexpr (Interleaved::kHalves) {
        const int32x4_t lo = dot_half<kRun, 0>(load_start(f.start[run][0]), c, a.lo),
                        hi = dot_half<kRun, 1>(load_start(f.start[run][1]), c, a.hi);
        sum = Simd::to_float4(
            vmlaq_s32(vmulq_s32(lo, s.template half<kRun, 0>()), hi, s.template half<kRun, 1>()));
      } else {
        const int32x4_t isum =
            dot_half<kRun, 1>(dot_half<kRun, 0>(load_start(f.start[0][0]), c, a.lo), c, a.hi);
        sum = vsubq_f32(vreinterpretq_f32_s32(isum), vreinterpretq_f32_s32(vdupq_n_s32(kFloatOrigin)));
      }
      acc[m] = Simd::fma4(sum, Simd::mul4(d, f.scale[run]), acc[m]);
      if constexpr (Interleaved::kMin) acc[m] = Simd::fma4(s.template min_of<kRun>(), f.min[run], acc[m]);
    });
  }

  [[gnu::always_inline]] void run(int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
      unroll<Interleaved::kBlockBytes / 64>(
          [&](auto line) { __builtin_prefetch(weights + kAhead + 64 * line, 0, 2); });
      const Scales s(weights);
      unroll<8>([&](auto i) { multiply_run<i>(s, 8 * b + i); });
      weights += Interleaved::kBlockBytes;
      unroll<kM>([&](auto m) { x[m] += 8; });
    }
  }
  static constexpr int64_t kAhead = 9216;  // bytes, to the second-level cache; fours follow each other
};

// Lanes of a four that begins `at` outputs from `out`, maybe before it or with its end past `count` of them.
inline void store_four(float* out, int64_t at, int64_t count, F4 lanes) {
  if (at >= 0 && at + 4 <= count) {
    Simd::store4(out + at, lanes);
    return;
  }
  float value[4];
  Simd::store4(value, lanes);
  for (int64_t i = 0; i < 4; ++i) {
    if (at + i >= 0 && at + i < count) out[at + i] = value[i];
  }
}
inline F4 load_four(const float* out, int64_t at, int64_t count) {
  float value[4] = {};
  for (int64_t i = 0; i < 4; ++i) {
    if (at + i >= 0 && at + i < count) value[i] = out[at + i];
  }
  return Simd::set4(value);
}

// All rows of the chunk by kM rows of activations, which stay in the first-level cache meanwhile.
template <class Interleaved, int kM>
void interleaved_chunk(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t m,
                       float* out, int64_t out_stride) {
  RunFactors<Interleaved> factors[kM];
  const int64_t all = w.cols / kQuantBlock;
  for (int64_t at = 0; at < all; at += kRunsPerPass) {
    const int64_t runs = all - at < kRunsPerPass ? all - at : kRunsPerPass;
    InterleavedGemv<Interleaved, kM> gemv;
    gemv.factors = factors;
    const ActivationBlock* rows[kM];
    for (int i = 0; i < kM; ++i) {
      rows[i] = reinterpret_cast<const ActivationBlock*>(panel_row(x, m + i)) + at;
      factors[i].prepare(rows[i], runs);
    }
    for (int64_t four = first / 4 * 4; four < first + num_rows; four += 4) {
      gemv.weights = w.data + four * w.row_bytes + at / 8 * Interleaved::kBlockBytes;
      unroll<kM>([&](auto i) {
        gemv.x[i] = rows[i];
        gemv.acc[i] = at == 0 ? Simd::zero4() : load_four(out + (m + i) * out_stride, four - first, num_rows);
      });
      gemv.run(runs / 8);
      unroll<kM>(
          [&](auto i) { store_four(out + (m + i) * out_stride, four - first, num_rows, gemv.acc[i]); });
    }
  }
}

template <class Interleaved>
void interleaved_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                        float* out, int64_t out_stride) {
  if (num_m >= kMinGemmRows && first % 4 == 0) {
    gemm<Interleaved>(w, first, num_rows, x, num_m, out, out_stride);
    return;
  }
  int64_t m = 0;
  // Not eight: eight codes and eight sums leave no registers for the rest (98 cycles a run; twice four are
  // 82).
  for (; m + 4 <= num_m; m += 4) interleaved_chunk<Interleaved, 4>(w, first, num_rows, x, m, out, out_stride);
  for (; m + 2 <= num_m; m += 2) interleaved_chunk<Interleaved, 2>(w, first, num_rows, x, m, out, out_stride);
  if (m < num_m) interleaved_chunk<Interleaved, 1>(w, first, num_rows, x, m, out, out_stride);
}

inline void put_interleaved(KernelTable& table) {
  table.interleaved_rows = 4;
  table.matmul[static_cast<int>(Format::kInterleavedQ4_K)] = interleaved_matmul<InterleavedQ4_K>;
  table.matmul[static_cast<int>(Format::kInterleavedQ5_K)] = interleaved_matmul<InterleavedQ5_K>;
  table.matmul[static_cast<int>(Format::kInterleavedQ6_K)] = interleaved_matmul<InterleavedQ6_K>;
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
