// How each block-quantized type is unpacked: codes as 32 int8, scales (and minimums) of four rows as four
// lanes.
//
// A format says
//   kBlockBytes, kSubBlocks   a stored block holds kSubBlocks runs of 32 elements
//   kUnsigned, kOffset        codes are not negative; the value is d * (code - kOffset)
//   kMin                      d * code + m instead
//   Scales                    of one stored block of four rows; d(s), m(s) for run s
//   load<r>(block, g)         the codes of run 4 g + r
//   kDoubled                  codes are twice the values
//   kHalves                   a run has an integer scale for each of its halves besides: half_scales(...), of
//                             Q6_K where they lie, of the others unpacked by unpack_halves into Scales
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#include "kernels/quant/blocks.h"
#if defined(MILLRACE_SIMD_AVX512)
#error "matmul/formats_x86.h is for this target"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

using I8x32 = Simd::I8x32;
using F4 = Simd::F4;
namespace q = millrace::quant;

// For types with one scale per 32, an f16 at kAt.
template <int kAt>
struct HalfScale {
  F4 scale;
  explicit HalfScale(const uint8_t* const* rows) : scale(Simd::halves4(rows, kAt)) {}
  F4 d(int64_t) const { return scale; }
};

// f16 scale and f16 minimum, the first two of a block.
struct HalfScaleMin {
  F4 scale, min;
  explicit HalfScaleMin(const uint8_t* const* rows)
      : scale(Simd::halves4(rows, 0)), min(Simd::halves4(rows, 2)) {}
  F4 d(int64_t) const { return scale; }
  F4 m(int64_t) const { return min; }
};

// d * 6-bit scale and -(dmin * 6-bit min) of eight runs: Q4_K and Q5_K.
template <class S>
struct KScalesOf {
  float scale[8][4], min[8][4];  // [run][row]
  explicit KScalesOf(const uint8_t* const* rows) {
    if constexpr (requires { S::unpack_k_scales(rows, scale, min); }) {
      S::unpack_k_scales(rows, scale, min);
    } else {
      unpack(rows);
    }
  }
  void unpack(const uint8_t* const* rows) {
    float d[4], dmin[4];
    Simd::store4(d, Simd::halves4(rows, 0));
    Simd::store4(dmin, Simd::halves4(rows, 2));
    for (int r = 0; r < 4; ++r) {
      // Three words: low six bits of scales 0-3, of mins 0-3, then nibbles of both 4-7 with their two high
      // bits on top of the first two words.
      uint32_t w[3];
      __builtin_memcpy(w, rows[r] + 4, 12);
      const uint32_t s[2] = {w[0] & 0x3f3f3f3fu, (w[2] & 0x0f0f0f0fu) | ((w[0] >> 2) & 0x30303030u)};
      const uint32_t m[2] = {w[1] & 0x3f3f3f3fu, ((w[2] >> 4) & 0x0f0f0f0fu) | ((w[1] >> 2) & 0x30303030u)};
      for (int i = 0; i < 8; ++i) {
        const int shift = 8 * (i % 4);
        scale[i][r] = d[r] * static_cast<float>(static_cast<int32_t>((s[i / 4] >> shift) & 63u));
        min[i][r] = -(dmin[r] * static_cast<float>(static_cast<int32_t>((m[i / 4] >> shift) & 63u)));
      }
    }
  }
  F4 d(int64_t run) const { return Simd::set4(scale[run]); }
  F4 m(int64_t run) const { return Simd::set4(min[run]); }
};
using KScales = KScalesOf<Simd>;

template <class Block, int kOffsetValue = 0>
struct Plain {
  static constexpr int kBlockBytes = sizeof(Block), kSubBlocks = 1, kOffset = kOffsetValue;
  static constexpr bool kMin = false, kUnsigned = true, kHalves = false, kSplit = false, kDoubled = false;
  using Scales = HalfScale<0>;
};

struct FormatQ8_0 : Plain<q::BlockQ8_0> {
  static constexpr bool kUnsigned = false;
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::load_i8(reinterpret_cast<const int8_t*>(block) + 2);
  }
};

struct FormatQ4_0 : Plain<q::BlockQ4_0, 8> {
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::load_nibbles(block + 2);
  }
};

struct FormatQ4_1 : Plain<q::BlockQ4_1> {
  static constexpr bool kMin = true;
  using Scales = HalfScaleMin;
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::load_nibbles(block + 4);
  }
};

struct FormatQ5_0 : Plain<q::BlockQ5_0, 16> {
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::or_fifth_bits(Simd::load_nibbles(block + 6), block + 2);
  }
};

struct FormatQ5_1 : Plain<q::BlockQ5_1> {
  static constexpr bool kMin = true;
  using Scales = HalfScaleMin;
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::or_fifth_bits(Simd::load_nibbles(block + 8), block + 4);
  }
};

struct FormatQ4_K : Plain<q::BlockQ4_K> {
  static constexpr int kSubBlocks = 8;
  static constexpr bool kMin = true;
  using Scales = KScales;
  template <int kRun>
  static I8x32 load(const uint8_t* block, int64_t group) {
    return Simd::load_nibble_run<4 * (kRun % 2)>(block + 16 + 64 * group + 32 * (kRun / 2));
  }
};

struct FormatQ5_K : Plain<q::BlockQ5_K> {
  static constexpr int kSubBlocks = 8;
  static constexpr bool kMin = true;
  using Scales = KScales;
  template <int kRun>
  static I8x32 load(const uint8_t* block, int64_t group) {
    const I8x32 low = Simd::load_nibble_run<4 * (kRun % 2)>(block + 48 + 64 * group + 32 * (kRun / 2));
    return Simd::or_high_run<1>(low, block + 16, static_cast<int>(4 * group + kRun));
  }
};

struct FormatQ6_K : Plain<q::BlockQ6_K> {
  static constexpr int kSubBlocks = 8;
  static constexpr bool kUnsigned = false, kHalves = true;
  static constexpr int kHalfScalesAt = 192;
  using Scales = HalfScale<208>;
  template <int kRun>
  static I8x32 load(const uint8_t* block, int64_t group) {
    const I8x32 low = Simd::load_nibble_run<4 * (kRun / 2)>(block + 64 * group + 32 * (kRun % 2));
    return Simd::sub_i8(Simd::or_high_run<2>(low, block + 128 + 32 * group, 2 * kRun), 32);
  }
  static const int8_t* half_scales(const Scales&, const uint8_t* block, int) {
    return reinterpret_cast<const int8_t*>(block) + kHalfScalesAt;
  }
};

// An f16 scale at kAt, times kSign, and sixteen integer scales of each row, as Format unpacks them.
template <class Format, int kAt, int kSign = 1>
struct HalvesScale {
  F4 scale;
  int8_t half[4][16];  // [row][half run]
  explicit HalvesScale(const uint8_t* const* rows)
      : scale(Simd::mul4(Simd::halves4(rows, kAt), static_cast<float>(kSign))) {
    for (int r = 0; r < 4; ++r) Format::unpack_halves(rows[r], half[r]);
  }
  F4 d(int64_t) const { return scale; }
};
template <class Format, class Block, int kScaleAt, int kSign = 1>
struct Halved : Plain<Block> {
  static constexpr int kSubBlocks = 8;
  static constexpr bool kUnsigned = false, kHalves = true;
  using Scales = HalvesScale<Format, kScaleAt, kSign>;
  static const int8_t* half_scales(const Scales& scales, const uint8_t*, int row) { return scales.half[row]; }
};

struct FormatQ3_K : Halved<FormatQ3_K, q::BlockQ3_K, 108> {
  template <int kRun>
  static I8x32 load(const uint8_t* block, int64_t group) {
    const I8x32 pairs = Simd::bits_run<2, 0>(block + 32 + 32 * group, 2 * kRun);
    const I8x32 third = Simd::bits_run<1, 2>(block, static_cast<int>(4 * group + kRun));
    return Simd::sub_i8(Simd::or_i8(pairs, third), 4);
  }
  // Twelve bytes as three words: nibbles of scales 0-3 and 8-11, of 4-7 and 12-15, then the pairs above them.
  static void unpack_halves(const uint8_t* block, int8_t* half) {
    uint32_t w[3];
    __builtin_memcpy(w, block + 96, 12);
    const uint32_t nibbles = 0x0f0f0f0fu, pairs = 0x30303030u;
    const uint32_t s[4] = {(w[0] & nibbles) | ((w[2] << 4) & pairs), (w[1] & nibbles) | ((w[2] << 2) & pairs),
                           ((w[0] >> 4) & nibbles) | (w[2] & pairs),
                           ((w[1] >> 4) & nibbles) | ((w[2] >> 2) & pairs)};
    __builtin_memcpy(half, s, 16);
    for (int i = 0; i < 16; ++i) half[i] = static_cast<int8_t>(half[i] - 32);
  }
};

// Q2_K is two products: of its codes, and of ones with its minimums, whose sign is turned.
struct FormatQ2_K : Halved<FormatQ2_K, q::BlockQ2_K, 80> {
  template <int kRun>
  static I8x32 load(const uint8_t* block, int64_t group) {
    return Simd::bits_run<2, 0>(block + 16 + 32 * group, 2 * kRun);
  }
  static void unpack_halves(const uint8_t* block, int8_t* half) {
    for (int i = 0; i < 16; ++i) half[i] = static_cast<int8_t>(block[i] & 15);
  }
};
struct FormatQ2_KMins : Halved<FormatQ2_KMins, q::BlockQ2_K, 82, -1> {
  template <int>
  static I8x32 load(const uint8_t*, int64_t) {
    return Simd::all_i8(1);
  }
  static void unpack_halves(const uint8_t* block, int8_t* half) {
    for (int i = 0; i < 16; ++i) half[i] = static_cast<int8_t>(block[i] >> 4);
  }
};

struct FormatIQ4_NL : Plain<q::BlockIQ4_NL> {
  static constexpr bool kUnsigned = false;
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::lookup(Simd::load_nibbles(block + 2), q::kIQ4Levels);
  }
};

// d * (6-bit scale - 32) of eight runs: two bits of each at 2, nibbles at 4.
struct XsScales {
  float scale[8][4];  // [run][row]
  explicit XsScales(const uint8_t* const* rows) {
    float d[4];
    Simd::store4(d, Simd::halves4(rows, 0));
    for (int r = 0; r < 4; ++r) {
      uint16_t high;
      uint32_t low;
      __builtin_memcpy(&high, rows[r] + 2, 2);
      __builtin_memcpy(&low, rows[r] + 4, 4);
      for (int i = 0; i < 8; ++i) {
        const uint32_t s = ((low >> (4 * i)) & 15u) | ((uint32_t{high} >> (2 * i)) & 3u) << 4;
        scale[i][r] = d[r] * static_cast<float>(static_cast<int32_t>(s) - 32);
      }
    }
  }
  F4 d(int64_t run) const { return Simd::set4(scale[run]); }
};

struct FormatIQ4_XS : Plain<q::BlockIQ4_XS> {
  static constexpr int kSubBlocks = 8;
  static constexpr bool kUnsigned = false;
  using Scales = XsScales;
  template <int kRun>
  static I8x32 load(const uint8_t* block, int64_t group) {
    return Simd::lookup(Simd::load_nibbles(block + 8 + 64 * group + 16 * kRun), q::kIQ4Levels);
  }
};

// A short float and a zero point in sixteen bits (quant/blocks.h).
struct ZeroPointScale {
  F4 scale, min;
  explicit ZeroPointScale(const uint8_t* const* rows) { Simd::zero_points4(rows, scale, min); }
  F4 d(int64_t) const { return scale; }
  F4 m(int64_t) const { return min; }
};

struct FormatQ4_Z : Plain<q::BlockQ4_Z> {
  static constexpr bool kMin = true;
  using Scales = ZeroPointScale;
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::load_nibbles(block + 2);
  }
};

// 2^(e - 127). Codes are twice the e2m1 values; the other half is on the activations' side (kDoubled).
struct E8M0First {
  F4 scale;
  explicit E8M0First(const uint8_t* const* rows) : scale(Simd::e8m0_4(rows)) {}
  F4 d(int64_t) const { return scale; }
};

struct FormatMXFP4 : Plain<q::BlockMXFP4> {
  static constexpr bool kUnsigned = false, kDoubled = true;
  using Scales = E8M0First;
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::lookup(Simd::load_nibbles(block + 1), q::kE2M1Doubled);
  }
};

struct FormatMXFP4Split : Plain<q::BlockMXFP4Split> {
  static constexpr bool kUnsigned = false, kSplit = true, kDoubled = true;
  using Scales = E8M0First;  // of the scale rows
  template <int>
  static I8x32 load(const uint8_t* block, int64_t) {
    return Simd::interleave(Simd::lookup(Simd::load_nibbles(block), q::kE2M1Doubled));
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
