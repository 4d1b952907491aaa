// One row of activations by four rows of MXFP4 weights: most of what gpt-oss does for a token. The numbers
// are Gemv's (gemv_neon.h); what differs is that instructions stay in the order written here.
//
// Roofline: 68 bytes of weights take 31 vector slots (and, ushr, 2 tbl, 2 sdot a row; 3 addp, fsub, ins,
// fmul, fmla for four): 15.5 cycles where there are two vector units. Such a core (Neoverse-N1) waits with
// few instructions at hand, so none may stand behind what it needs: a step reads the codes of block b + 2,
// unpacks those of b + 1, multiplies b and adds b - 1 to the sums. A compiler's order takes 22.9 cycles, this
// one 18.3, from the first-level cache.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/matmul/formats.h"
#include "kernels/cpu/matmul/unpacked_panel_neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Half of 2^(e - 127), for codes are twice the values; 255, a NaN, becomes infinity.
struct HalfE8M0 {
  uint32_t bits[256];
  constexpr HalfE8M0() : bits() {
    for (uint32_t e = 2; e < 255; ++e) bits[e] = (e - 1) << 23;
    bits[0] = 0x00200000;
    bits[1] = 0x00400000;
    bits[255] = 0x7f800000;
  }
};
inline constexpr HalfE8M0 kHalfE8M0;

// Where a sum of four lanes begins: read as a float, 1.5 * 2^23 plus the sum of the lanes.
alignas(16) inline constexpr int32_t kSumOrigin[4] = {kFloatOrigin, 0, 0, 0};

// Instructions that stay where they are.
#define MILLRACE_ORDERED [[gnu::always_inline]] static inline
struct Ordered {
  MILLRACE_ORDERED int8x16_t load(const void* from) {
    int8x16_t to;
    asm volatile("ldr %q0, %1" : "=w"(to) : "m"(*static_cast<const int8x16_t*>(from)));
    return to;
  }
  MILLRACE_ORDERED F4 load_scalar(const float* from) {
    F4 to;
    asm volatile("ldr %s0, %1" : "=w"(to) : "m"(*from));
    return to;
  }
  MILLRACE_ORDERED uint64_t load_byte(const uint8_t* from) {
    uint64_t to;
    asm volatile("ldrb %w0, %1" : "=r"(to) : "m"(*from));
    return to;
  }
  MILLRACE_ORDERED uint64_t load_scale(uint64_t e8m0) {
    uint64_t to;
    asm volatile("ldr %w0, [%1, %2, lsl #2]" : "=r"(to) : "r"(kHalfE8M0.bits), "r"(e8m0));
    return to;
  }
  MILLRACE_ORDERED int8x16_t bits_and(int8x16_t a, int8x16_t b) {
    int8x16_t to;
    asm volatile("and %0.16b, %1.16b, %2.16b" : "=w"(to) : "w"(a), "w"(b));
    return to;
  }
  MILLRACE_ORDERED int8x16_t upper_nibbles(int8x16_t a) {
    int8x16_t to;
    asm volatile("ushr %0.16b, %1.16b, #4" : "=w"(to) : "w"(a));
    return to;
  }
  MILLRACE_ORDERED int8x16_t lookup(int8x16_t table, int8x16_t at) {
    int8x16_t to;
    asm volatile("tbl %0.16b, {%1.16b}, %2.16b" : "=w"(to) : "w"(table), "w"(at));
    return to;
  }
  MILLRACE_ORDERED int32x4_t first_dot(int8x16_t a, int8x16_t b) {
    int32x4_t to;
    asm volatile("ldr %q0, [%3]\n\tsdot %0.4s, %1.16b, %2.16b" : "=&w"(to) : "w"(a), "w"(b), "r"(kSumOrigin));
    return to;
  }
  MILLRACE_ORDERED int32x4_t dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
    int32x4_t to;
    asm volatile("sdot %0.4s, %1.16b, %2.16b" : "=w"(to) : "w"(a), "w"(b), "0"(sum));
    return to;
  }
  MILLRACE_ORDERED int32x4_t add_pairs(int32x4_t a, int32x4_t b) {
    int32x4_t to;
    asm volatile("addp %0.4s, %1.4s, %2.4s" : "=w"(to) : "w"(a), "w"(b));
    return to;
  }
  MILLRACE_ORDERED F4 sub(int32x4_t a, F4 b) {
    F4 to;
    asm volatile("fsub %0.4s, %1.4s, %2.4s" : "=w"(to) : "w"(a), "w"(b));
    return to;
  }
  MILLRACE_ORDERED F4 mul_lane0(F4 a, F4 b) {
    F4 to;
    asm volatile("fmul %0.4s, %1.4s, %2.s[0]" : "=w"(to) : "w"(a), "w"(b));
    return to;
  }
  MILLRACE_ORDERED F4 fma(F4 a, F4 b, F4 sum) {
    F4 to;
    asm volatile("fmla %0.4s, %1.4s, %2.4s" : "=w"(to) : "w"(a), "w"(b), "0"(sum));
    return to;
  }
  MILLRACE_ORDERED F4 low_half(uint64_t bits) {
    F4 to;
    asm volatile("fmov %d0, %1" : "=w"(to) : "r"(bits));
    return to;
  }
  MILLRACE_ORDERED F4 high_half(F4 low, uint64_t bits) {
    F4 to;
    asm volatile("ins %0.d[1], %1" : "=w"(to) : "r"(bits), "0"(low));
    return to;
  }
};
#undef MILLRACE_ORDERED

template <class Format>
struct MxFp4Gemv {
  static constexpr int kBytes = Format::kBlockBytes, kCodesAt = Format::kSplit ? 0 : 1;
  const int8x16_t values, nibble;
  const F4 origin;
  int8x16_t raw[4];                                // of block b + 1 when a step begins
  int8x16_t low[4], high[4];                       // codes of block b
  int8x16_t x_low, x_high;                         // its activations
  int32x4_t pair01, pair23;                        // sums of block b - 1, of two rows each
  F4 factor = Simd::zero4(), acc = Simd::zero4();  // of block b - 1; of those before

  MxFp4Gemv()
      : values(vld1q_s8(q::kE2M1Doubled)),
        nibble(vdupq_n_s8(15)),
        origin(vreinterpretq_f32_s32(vdupq_n_s32(kFloatOrigin))) {}

  // Block b: its scales at `e8m0`, its activations at `x`; block b + 2 begins at `ahead`, the next
  // activations at `next`.
  [[gnu::always_inline]] void step(const uint8_t* const (&e8m0)[4], const uint8_t* const (&ahead)[4],
                                   const ActivationBlock* x, const ActivationBlock* next) {
    using O = Ordered;
    int32x4_t sum[4], four;
    int8x16_t lower[4], upper[4];
    uint64_t scale[4];
    F4 scales, x_scale, last;
    const auto begin = [&](auto r) __attribute__((always_inline)) {
      sum[r] = O::first_dot(low[r], x_low);
      lower[r] = O::bits_and(raw[r], nibble);
      upper[r] = O::upper_nibbles(raw[r]);
    };
    const auto middle = [&](auto r) __attribute__((always_inline)) {
      low[r] = O::lookup(values, lower[r]);
      sum[r] = O::dot(sum[r], high[r], x_high);
      raw[r] = O::load(ahead[r] + kCodesAt);
    };
    begin(Index<0>{});
    scale[0] = O::load_byte(e8m0[0]);
    scale[1] = O::load_byte(e8m0[1]);
    begin(Index<1>{});
    scale[2] = O::load_byte(e8m0[2]);
    scale[3] = O::load_byte(e8m0[3]);
    begin(Index<2>{});
    four = O::add_pairs(pair01, pair23);
    begin(Index<3>{});
    unroll<4>([&](auto r) { scale[r] = O::load_scale(scale[r]); });
    middle(Index<0>{});
    x_scale = O::load_scalar(&x->scale);
    middle(Index<1>{});
    scales = O::low_half(scale[0] | scale[1] << 32);
    middle(Index<2>{});
    last = O::sub(four, origin);
    middle(Index<3>{});
    scales = O::high_half(scales, scale[2] | scale[3] << 32);
    high[0] = O::lookup(values, upper[0]);
    x_low = O::load(next->q);
    pair01 = O::add_pairs(sum[0], sum[1]);
    high[1] = O::lookup(values, upper[1]);
    x_high = O::load(next->q + 16);
    high[2] = O::lookup(values, upper[2]);
    acc = O::fma(last, factor, acc);
    factor = O::mul_lane0(scales, x_scale);
    high[3] = O::lookup(values, upper[3]);
    pair23 = O::add_pairs(sum[2], sum[3]);
    order_activations();
  }

  // Where low and high nibbles are neighbours, it is cheaper to part the activations than the codes of four
  // rows.
  [[gnu::always_inline]] void order_activations() {
    if constexpr (Format::kSplit) {
      const int8x16_t even = vuzp1q_s8(x_low, x_high), odd = vuzp2q_s8(x_low, x_high);
      x_low = even;
      x_high = odd;
    }
  }

  // Lanes of the four rows at `rows`, whose scales lie at `scales` if apart; `blocks` >= 2. `ahead`: as
  // Gemv::run.
  [[gnu::always_inline]] F4 run(const uint8_t* const (&rows)[4], const uint8_t* const (&scales)[4],
                                const ActivationBlock* x, int64_t blocks, int64_t ahead) {
    const uint8_t *at[4], *e8m0[4];
    unroll<4>([&](auto r) {
      at[r] = rows[r];
      e8m0[r] = scales[r];
      const I8x32 first = Simd::lookup(Simd::load_nibbles(at[r] + kCodesAt), q::kE2M1Doubled);
      low[r] = first.lo;
      high[r] = first.hi;
      raw[r] = Ordered::load(at[r] + kBytes + kCodesAt);
    });
    x_low = Ordered::load(x->q);
    x_high = Ordered::load(x->q + 16);
    order_activations();
    pair01 = pair23 = vdupq_n_s32(0);  // of no block: its factor is zero
    const auto steps = [&](auto count, const auto& later) __attribute__((always_inline)) {
      unroll<decltype(count){}>([&](auto k) __attribute__((always_inline)) {
        const uint8_t *scale_at[4], *codes_at[4];
        unroll<4>([&](auto r) {
          scale_at[r] = Format::kSplit ? e8m0[r] + k : at[r] + k * kBytes;
          codes_at[r] = later(r, k);
        });
        step(scale_at, codes_at, x + k, x + k + 1);
      });
      unroll<4>([&](auto r) {
        at[r] += decltype(count){} * kBytes;
        e8m0[r] += decltype(count){};
      });
      x += decltype(count){};
    };
    const auto after_next = [&](int r, int k) __attribute__((always_inline)) {
      return at[r] + (k + 2) * kBytes;
    };
    int64_t b = 0;
    for (; b + 4 <= blocks - 2; b += 4) {
      unroll<4>([&](auto r) { __builtin_prefetch(at[r] + ahead); });
      steps(Index<4>{}, after_next);
    }
    for (; b < blocks - 2; ++b) steps(Index<1>{}, after_next);
    // Nothing lies behind the last block: a row's beginning is read again, for nobody.
    const auto beginning = [&](int r, int) __attribute__((always_inline)) { return rows[r]; };
    steps(Index<1>{}, beginning);
    unroll<4>([&](auto r) { at[r] = Format::kSplit ? e8m0[r] : at[r]; });
    step(at, rows, x, x - 1);
    const F4 last = vsubq_f32(vreinterpretq_f32_s32(vpaddq_s32(pair01, pair23)), origin);
    return Simd::fma4(last, factor, acc);
  }
};

template <class Format>
inline constexpr bool kHasOwnGemv = false;
template <>
inline constexpr bool kHasOwnGemv<FormatMXFP4> = true;
template <>
inline constexpr bool kHasOwnGemv<FormatMXFP4Split> = true;

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
