// How each block-quantized type is unpacked kRows rows at a time: sixteen for AVX-512 and the AMX tiles,
// eight for AVX2.
//
// A run is 32 elements. Unpacked, a run of kRows rows is eight registers: dword r of register j holds codes
// 4 j .. 4 j + 3 of row r. That is what vpdpbusd wants beside a broadcast dword of activations (a lane per
// row of weights, no horizontal sums), and also how a tile of the matrix unit lies in memory. Getting there
// from rows is a 4 x 4 transposition of dwords: 16 loads and 8 shuffles for 16 x 16 bytes with AVX-512.
//
// A format says
//   kBlockBytes, kRuns   a stored block holds kRuns runs
//   kMaxCode             the largest code, unpacked unsigned
//   kOffset              codes are unpacked unsigned, the value is d * (code - kOffset); kSigned unpacks
//                        code - kOffset itself
//   kMin                 d * code + m instead
//   kHalves              a run has an integer scale for each of its halves besides (Q6_K)
//   kSplit               scales are rows of their own
//   kEven                blocks are also unpacked from rows evenly apart
//   kInterleaved         kRows rows lie interleaved, in as many bytes (interleave_rows.h)
//   kParts               runs that are unpacked together, a group
//   Block(rows, at)      a stored block of kRows rows, `at` bytes into each; unpack<part, kSigned>(u,
//                        group), in order, gives run kParts * group + part
//   scales(...)          d (and m) of `runs` runs of kRows rows from run `first` on, as floats [run][kRows]
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/rows_x86.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/quant/blocks.h"

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

namespace q = millrace::quant;

// Runs that are packed together, and the largest number whose scales are taken together: one stored block of
// the K types.
constexpr int64_t kPackedRuns = 8;

// Rows evenly apart: a few pointers and a distance are registers, a pointer a row is a load.
struct EvenRows {
  const uint8_t* fourth[kRows / 4];  // rows 0, 4 ...
  int64_t apart;
  [[gnu::always_inline]] const uint8_t* operator[](int r) const { return fourth[r / 4] + r % 4 * apart; }
  [[gnu::always_inline]] void go(int64_t bytes) {
    unroll<kRows / 4>([&](auto i) { fourth[i] += bytes; });
  }
};
inline EvenRows even_rows(const uint8_t* first, int64_t apart) {
  EvenRows rows;
  unroll<kRows / 4>([&](auto i) { rows.fourth[i] = first + 4 * i * apart; });
  rows.apart = apart;
  return rows;
}

// 16 bytes of rows i, i + 4 ... at `at`.
template <class Rows>
[[gnu::always_inline]] inline V every_fourth_row(const Rows& rows, int i, int64_t at) {
#if defined(MILLRACE_SIMD_AVX512)
  V v = _mm512_castsi128_si512(load128(rows[i] + at));
  v = _mm512_inserti32x4(v, load128(rows[i + 4] + at), 1);
  v = _mm512_inserti32x4(v, load128(rows[i + 8] + at), 2);
  return _mm512_inserti32x4(v, load128(rows[i + 12] + at), 3);
#else
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(rows[i] + at)), load128(rows[i + 4] + at), 1);
#endif
}

// t[j]: dword r holds bytes 4 j .. 4 j + 3 of the 16 at rows[r] + at.
template <class Rows>
[[gnu::always_inline]] inline void transpose(const Rows& rows, int64_t at, V* t) {
  V z[4];
  unroll<4>([&](auto i) { z[i] = every_fourth_row(rows, i, at); });
  const V a = low_dwords(z[0], z[1]), b = low_dwords(z[2], z[3]);
  const V c = high_dwords(z[0], z[1]), d = high_dwords(z[2], z[3]);
  t[0] = low_qwords(a, b);
  t[1] = high_qwords(a, b);
  t[2] = low_qwords(c, d);
  t[3] = high_qwords(c, d);
}

// kRows rows that lie interleaved: `at` bytes into each row are kRows times as many into all of them.
struct InterleavedRows {
  const uint8_t* group;
  InterleavedRows(const uint8_t* const* rows) : group(rows[0]) {}  // NOLINT: in place of pointers to rows
  explicit InterleavedRows(const uint8_t* at) : group(at) {}
};
template <class Rows>
inline constexpr bool kInterleavedRows = __is_same(Rows, InterleavedRows);
[[gnu::always_inline]] inline V dwords_of_rows(const InterleavedRows& rows, int64_t at) {
  return load_bytes(rows.group + kRows * at);
}
[[gnu::always_inline]] inline void transpose(const InterleavedRows& rows, int64_t at, V* t) {
  unroll<4>([&](auto j) { t[j] = dwords_of_rows(rows, at + 4 * j); });
}

// Four bytes of each row at `at`.
template <class Rows>
[[gnu::always_inline]] inline V dwords_of_rows(const Rows& rows, int64_t at) {
  alignas(64) uint32_t words[kRows];
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(&words[r], rows[r] + at, 4);
  return load_bytes(words);
}
// One f16 of each row, of rows that lie interleaved.
[[gnu::always_inline]] inline F halves_at(const uint8_t* p) {
  return load_halves(reinterpret_cast<const uint16_t*>(p));
}

inline V low_nibbles(V t) { return bit_and(t, bytes_of(15)); }
inline V high_nibbles(V t) { return bit_and(shift_right16(t, 4), bytes_of(15)); }
inline V or_bit4(V u, V bits) { return or_and(u, bits, bytes_of(16)); }

template <bool kSigned, int kOffset>
inline void lower(V* u) {
  if constexpr (kSigned && kOffset != 0) {
    unroll<8>([&](auto j) { u[j] = sub8(u[j], bytes_of(kOffset)); });
  }
}

// ---------------------------------------------------------------- scales

// One f16 per stored block, `at` bytes into it. Collected through memory: the stores have left long before
// the registers are loaded.
template <int kBlockBytes>
inline void half_scales(const uint8_t* const* rows, int64_t at, int64_t first, int64_t runs, float* out) {
  alignas(64) uint16_t raw[kPackedRuns][kRows];
  for (int64_t r = 0; r < kRows; ++r) {
    const uint8_t* row = rows[r] + first * kBlockBytes + at;
    for (int64_t b = 0; b < runs; ++b) __builtin_memcpy(&raw[b][r], row + b * kBlockBytes, 2);
  }
  for (int64_t b = 0; b < runs; ++b) {
    store_floats(out + kRows * b, load_halves(raw[b]));
  }
}

// Two f16 at the beginning of every block, taken as one dword.
template <int kBlockBytes>
inline void pairs_of_half_scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d,
                                 float* m) {
  alignas(64) uint32_t raw[kPackedRuns][kRows];
  for (int64_t r = 0; r < kRows; ++r) {
    const uint8_t* row = rows[r] + first * kBlockBytes;
    for (int64_t b = 0; b < runs; ++b) __builtin_memcpy(&raw[b][r], row + b * kBlockBytes, 4);
  }
  for (int64_t b = 0; b < runs; ++b) {
    const V both = load_bytes(raw[b]);
    store_floats(d + kRows * b, floats_of_low_halves(both));
    store_floats(m + kRows * b, floats_of_low_halves(shift_right32(both, 16)));
  }
}

// Q4_Z: d and m = -z d, exact, for d has five bits and z seven.
[[gnu::always_inline]] inline void zero_point_floats(const uint16_t* words, F* d, F* m) {
  const V dz = widen_words(words);
  const V bits = add32(shift_left32(shift_right32(dz, 7), 19), dwords_of(static_cast<int>(q::kQ4ZScaleBias)));
  *d = as_floats(bits);
  const F eighths = to_floats(bit_and(dz, dwords_of(127)));
  *m = multiply(*d, multiply(eighths, all(-0.125f)));
}
template <int kBlockBytes>
inline void zero_point_scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float* m) {
  alignas(64) uint16_t raw[kPackedRuns][kRows];
  for (int64_t r = 0; r < kRows; ++r) {
    const uint8_t* row = rows[r] + first * kBlockBytes;
    for (int64_t b = 0; b < runs; ++b) __builtin_memcpy(&raw[b][r], row + b * kBlockBytes, 2);
  }
  for (int64_t b = 0; b < runs; ++b) {
    F scale, min;
    zero_point_floats(raw[b], &scale, &min);
    store_floats(d + kRows * b, scale);
    store_floats(m + kRows * b, min);
  }
}

// e8m0 bytes to 2^(e - 127) / 2, for codes are twice the e2m1 values. 0 is a subnormal; 255, a NaN, becomes
// infinity.
[[gnu::always_inline]] inline F e8m0_floats(const uint8_t* bytes) {
  const V bits = shift_left32(widen_bytes(bytes), 23);
  const V e = max_u32(bits, dwords_of(0x00400000));
  return multiply(as_floats(e), all(0.5f));
}

#if defined(MILLRACE_SIMD_AVX512)
// b where the mask has ones, a elsewhere.
inline V blend_bits(V a, V b, uint64_t mask) {
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi64(static_cast<int64_t>(mask)), 0xd8);
}

// Where the scales of eight blocks of one row lie, in their 128 bits: those of block i of four in each.
struct ScaleSpread {
  uint8_t place[64];
};
constexpr ScaleSpread make_scale_spread(int first, int second) {
  ScaleSpread spread{};
  for (int i = 0; i < 64; ++i) spread.place[i] = static_cast<uint8_t>(i / 16 + (i % 16 < 8 ? first : second));
  return spread;
}
// MXFP4 has 17 bytes a block: byte 17 i is byte i of 128 bits of its own, and so is byte 17 (4 + i) - 64,
// four further on.
alignas(64) constexpr ScaleSpread kScaleSpread = make_scale_spread(0, 4);

// The scales of blocks 0 4 1 5 2 6 3 7 of a row, in every byte of a qword each.
inline V spread_scales(const uint8_t* row, Index<17>) {
  const V place = load_bytes(kScaleSpread.place);
  const V first = shuffle(load_bytes(row), place);
  return _mm512_mask_shuffle_epi8(first, 0xff00ff00ff00ff00, load_bytes(row + 64), place);
}
inline V spread_scales(const uint8_t* row, Index<1>) {
  int64_t eight;
  __builtin_memcpy(&eight, row, 8);
  return shuffle(_mm512_set1_epi64(eight), load_bytes(kScaleSpread.place));
}

// Byte r of qword i: the scale of row r, r < 8, of the block that spread_scales puts there.
template <int kStep>
[[gnu::always_inline]] inline V eight_rows_of_scales(const uint8_t* const* rows, int64_t at) {
  V v[8];
  unroll<8>([&](auto r) { v[r] = spread_scales(rows[r] + at, Index<kStep>{}); });
  unroll<4>([&](auto i) { v[2 * i] = blend_bits(v[2 * i], v[2 * i + 1], 0xff00ff00ff00ff00); });
  unroll<2>([&](auto i) { v[4 * i] = blend_bits(v[4 * i], v[4 * i + 2], 0xffff0000ffff0000); });
  return blend_bits(v[0], v[4], 0xffffffff00000000);
}

// Eight blocks of kRows rows: byte by byte through memory they would cost as much as the codes.
template <int kStep>
inline void transpose_scales(const uint8_t* const* rows, int64_t at, uint8_t (*raw)[kRows]) {
  const V low = eight_rows_of_scales<kStep>(rows, at), high = eight_rows_of_scales<kStep>(rows + 8, at);
  store_bytes(raw, low_qwords(low, high));
  store_bytes(raw[4], high_qwords(low, high));
}
#endif

// e8m0 bytes, kStep apart.
template <int kStep>
inline void e8m0_scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* out) {
  alignas(64) uint8_t raw[kPackedRuns][kRows];
#if defined(MILLRACE_SIMD_AVX512)
  if (runs == kPackedRuns) {
    transpose_scales<kStep>(rows, first * kStep, raw);
    unroll<kPackedRuns>([&](auto b) { store_floats(out + kRows * b, e8m0_floats(raw[b])); });
    return;
  }
#endif
  for (int64_t r = 0; r < kRows; ++r) {
    const uint8_t* row = rows[r] + first * kStep;
    for (int64_t b = 0; b < runs; ++b) raw[b][r] = row[b * kStep];
  }
  for (int64_t b = 0; b < runs; ++b) store_floats(out + kRows * b, e8m0_floats(raw[b]));
}

// Q4_K and Q5_K begin with d, dmin and twelve bytes of 6-bit scales and mins: 16 bytes, one transposition.
// Words: low six bits of scales 0-3, of mins 0-3, then nibbles of both 4-7 with their two high bits on top of
// the first two words.
template <class Rows>
inline void k_scales(const Rows& rows, int64_t at, float* d, float* m) {
  V t[4];
  transpose(rows, at, t);
  F scale, min;
  if constexpr (kInterleavedRows<Rows>) {
    scale = halves_at(rows.group + kRows * at);
    min = halves_at(rows.group + kRows * (at + 2));
  } else {
    scale = floats_of_low_halves(t[0]);
    min = floats_of_low_halves(shift_right32(t[0], 16));
  }
  const V six = bytes_of(63), two = bytes_of(0x30);
  const V s[2] = {bit_and(t[1], six), bit_or(low_nibbles(t[3]), bit_and(shift_right16(t[1], 2), two))};
  const V n[2] = {bit_and(t[2], six), bit_or(high_nibbles(t[3]), bit_and(shift_right16(t[2], 2), two))};
  unroll<8>([&](auto i) {
    const auto byte = [&](V v) { return to_floats(bit_and(shift_right32(v, 8 * (i % 4)), dwords_of(63))); };
    store_floats(d + kRows * i, multiply(scale, byte(s[i / 4])));
    const F product = multiply(min, byte(n[i / 4]));
    store_floats(m + kRows * i, as_floats(bit_xor(as_dwords(product), dwords_of(INT32_MIN))));
  });
}

// ---------------------------------------------------------------- formats

template <class Stored, int kMaxCodeValue, int kOffsetValue = 0>
struct Plain {
  static constexpr int kBlockBytes = sizeof(Stored), kRuns = 1, kParts = 1, kOffset = kOffsetValue,
                       kMaxCode = kMaxCodeValue;
  static constexpr bool kMin = false, kHalves = false, kSplit = false, kEven = true, kInterleaved = false;
  // Those of one block of kRows interleaved rows.
  [[gnu::always_inline]] static void block_scales(const uint8_t* block, F* d, F*) { *d = halves_at(block); }
  static void scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float*) {
    half_scales<kBlockBytes>(rows, 0, first, runs, d);
  }
};
template <class Stored, int kMaxCode>
struct WithMin : Plain<Stored, kMaxCode> {
  static constexpr bool kMin = true;
  [[gnu::always_inline]] static void block_scales(const uint8_t* block, F* d, F* m) {
    *d = halves_at(block);
    *m = halves_at(block + 2 * kRows);
  }
  static void scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float* m) {
    pairs_of_half_scales<sizeof(Stored)>(rows, first, runs, d, m);
  }
};

// 32 int8; unsigned they are 128 more.
struct FormatQ8_0 : Plain<q::BlockQ8_0, 255, 128> {
  template <class Rows>
  struct BlockOf {
    Rows rows;
    int64_t at;
    template <int, bool kSigned>
    [[gnu::always_inline]] void unpack(V* u, int = 0) {
      transpose(rows, at + 2, u);
      transpose(rows, at + 18, u + 4);
      if constexpr (!kSigned) unroll<8>([&](auto j) { u[j] = bit_xor(u[j], bytes_of(128)); });
    }
  };
  using Block = BlockOf<const uint8_t* const*>;
};

// Sixteen bytes of nibbles at kAt; elements 0-15 are the low ones.
template <class Rows, int kAt, int kOffset>
struct NibbleBlock {
  Rows rows;
  int64_t at;
  [[gnu::always_inline]] void open_nibbles(V* u) {
    V t[4];
    transpose(rows, at + kAt, t);
    unroll<4>([&](auto j) {
      u[j] = low_nibbles(t[j]);
      u[4 + j] = high_nibbles(t[j]);
    });
  }
  template <int, bool kSigned>
  [[gnu::always_inline]] void unpack(V* u, int = 0) {
    open_nibbles(u);
    lower<kSigned, kOffset>(u);
  }
};

struct FormatQ4_0 : Plain<q::BlockQ4_0, 15, 8> {
  template <class Rows>
  using BlockOf = NibbleBlock<Rows, 2, 8>;
  using Block = BlockOf<const uint8_t* const*>;
};
struct FormatQ4_1 : WithMin<q::BlockQ4_1, 15> {
  template <class Rows>
  using BlockOf = NibbleBlock<Rows, 4, 0>;
  using Block = BlockOf<const uint8_t* const*>;
};

struct FormatQ4_Z : Plain<q::BlockQ4_Z, 15> {
  static constexpr bool kMin = true;
  [[gnu::always_inline]] static void block_scales(const uint8_t* block, F* d, F* m) {
    zero_point_floats(reinterpret_cast<const uint16_t*>(block), d, m);
  }
  template <class Rows>
  using BlockOf = NibbleBlock<Rows, 2, 0>;
  using Block = BlockOf<const uint8_t* const*>;
  static void scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float* m) {
    zero_point_scales<kBlockBytes>(rows, first, runs, d, m);
  }
};

// A word of fifth bits before the nibbles: bit i for element i.
template <class Rows, int kAt, int kOffset>
struct FiveBitBlock {
  Rows rows;
  int64_t at;
  template <int, bool kSigned>
  [[gnu::always_inline]] void unpack(V* u, int = 0) {
    NibbleBlock<Rows, kAt + 4, 0>{rows, at}.open_nibbles(u);
    const V word = dwords_of_rows(rows, at + kAt);
    // Byte i of dword r of register j wants bit 4 j + i of its word at its bit 4.
#if defined(MILLRACE_HAS_AVX512_VBMI)
    // Eight bits of the quadword from bit 4 j + i - 4 on, which may wrap.
    const V place = _mm512_set1_epi64(0x1f1e1d1cfffefdfc);  // 28 29 30 31 | -4 -3 -2 -1
    unroll<8>([&](auto j) {
      u[j] = or_bit4(u[j], _mm512_multishift_epi64_epi8(add8(place, bytes_of(4 * j)), word));
    });
#else
    // Byte j / 2 of the dword in all four, and a mask of the bits wanted of it.
    const V dwords = repeat128(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    unroll<8>([&](auto j) {
      const V byte = shuffle(word, add8(dwords, bytes_of(j / 2)));
      const V bits = dwords_of(j % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
      u[j] = add_bit4(u[j], byte, bits);
    });
#endif
    lower<kSigned, kOffset>(u);
  }
};

struct FormatQ5_0 : Plain<q::BlockQ5_0, 31, 16> {
  static constexpr bool kEven = false;
  template <class Rows>
  using BlockOf = FiveBitBlock<Rows, 2, 16>;
  using Block = BlockOf<const uint8_t* const*>;
};
struct FormatQ5_1 : WithMin<q::BlockQ5_1, 31> {
  static constexpr bool kEven = false;
  template <class Rows>
  using BlockOf = FiveBitBlock<Rows, 4, 0>;
  using Block = BlockOf<const uint8_t* const*>;
};

template <class Stored, int kMaxCode>
struct Super : Plain<Stored, kMaxCode> {
  static constexpr int kRuns = 8, kParts = 2;
  static constexpr bool kMin = true;
  template <class Rows>
  static void scales(const Rows& rows, int64_t first, int64_t runs, float* d, float* m) {
    for (int64_t i = 0; i < runs; i += 8) {
      k_scales(rows, (first + i) / 8 * sizeof(Stored), d + kRows * i, m + kRows * i);
    }
  }
};

// Runs 2 i and 2 i + 1 are the low and high nibbles of the same 32 bytes.
struct FormatQ4_K : Super<q::BlockQ4_K, 15> {
  template <class Rows>
  struct BlockOf {
    Rows rows;
    int64_t at;
    V t[8];
    BlockOf(const Rows& from, int64_t offset) : rows(from), at(offset) {}
    template <int kPart, bool>
    [[gnu::always_inline]] void unpack(V* u, int group) {
      take<kPart>(group);
      unroll<8>([&](auto j) { u[j] = kPart == 0 ? low_nibbles(t[j]) : high_nibbles(t[j]); });
    }
    template <int kPart>
    [[gnu::always_inline]] void take(int group) {
      if constexpr (kPart == 0) {
        transpose(rows, at + 16 + 32 * group, t);
        transpose(rows, at + 32 + 32 * group, t + 4);
      }
    }
  };
  using Block = BlockOf<const uint8_t* const*>;
};

// Bit s of byte i of `high` is the fifth bit of element i of run s.
struct FormatQ5_K : Super<q::BlockQ5_K, 31> {
  template <class Rows>
  struct BlockOf {
    Rows rows;
    int64_t at;
    V t[8], h[8];
    BlockOf(const Rows& from, int64_t offset) : rows(from), at(offset) {}
    template <int kPart, bool>
    [[gnu::always_inline]] void unpack(V* u, int group) {
      if (kPart == 0 && group == 0) {
        transpose(rows, at + 16, h);
        transpose(rows, at + 32, h + 4);
      }
      if constexpr (kPart == 0) {
        transpose(rows, at + 48 + 32 * group, t);
        transpose(rows, at + 64 + 32 * group, t + 4);
      }
      // The group's two fifth bits are the lowest of h; a word's shift keeps the four that are still to come
      // in their byte.
      unroll<8>([&](auto j) {
        const V low = kPart == 0 ? low_nibbles(t[j]) : high_nibbles(t[j]);
        u[j] = or_bit4(low, shift_left16(h[j], 4 - kPart));
        if constexpr (kPart == 1) h[j] = shift_right16(h[j], 2);
      });
    }
  };
  using Block = BlockOf<const uint8_t* const*>;
};

// Half g of a block: run 4 g + r has its low bits in nibble r / 2 of low[64 g + 32 (r % 2) + i] and its high
// two in bits 2 r of high[32 g + i].
struct FormatQ6_K : Plain<q::BlockQ6_K, 63, 32> {
  static constexpr int kRuns = 8, kParts = 4;
  static constexpr bool kHalves = true;
  template <class Rows>
  static void scales(const Rows& rows, int64_t first, int64_t runs, float* d, float*) {
    for (int64_t i = 0; i < runs; i += 8) {
      if constexpr (kInterleavedRows<Rows>) {
        store_floats(d + kRows * i, halves_at(rows.group + kRows * ((first + i) / 8 * kBlockBytes + 208)));
      } else {
        half_scales<kBlockBytes>(rows, 208, (first + i) / 8, 1, d + kRows * i);
      }
      for (int64_t s = 1; s < 8; ++s) store_floats(d + kRows * (i + s), load_floats(d + kRows * i));
    }
  }
  template <class Rows>
  struct BlockOf {
    Rows rows;
    int64_t at;
    V t[16], h[8];
    BlockOf(const Rows& from, int64_t offset) : rows(from), at(offset) {}
    template <int kPart, bool kSigned>
    [[gnu::always_inline]] void unpack(V* u, int group) {
      if constexpr (kPart == 0) {
        unroll<4>([&](auto i) { transpose(rows, at + 64 * group + 16 * i, t + 4 * i); });
        unroll<2>([&](auto i) { transpose(rows, at + 128 + 32 * group + 16 * i, h + 4 * i); });
      }
      unroll<8>([&](auto j) {
        const V from = t[8 * (kPart % 2) + j];
        const V low = kPart / 2 == 0 ? low_nibbles(from) : high_nibbles(from);
        const V bits =
            kPart <= 2 ? shift_left16(h[j], kPart <= 2 ? 4 - 2 * kPart : 0) : shift_right16(h[j], 2);
        u[j] = or_and(low, bits, bytes_of(0x30));
      });
      lower<kSigned, 32>(u);
    }
    // The integer scale of half `half` of run 4 * group + kPart, a lane per row.
    template <int kPart>
    [[gnu::always_inline]] static V half_scale(const V* scales, int group, int half) {
      const V four = scales[2 * group + kPart / 2];  // scales 4 i .. 4 i + 3 of the block
      return signed_right32(shift_left32(four, 24 - 16 * (kPart % 2) - 8 * half), 24);
    }
    [[gnu::always_inline]] void load_half_scales(V* scales) const { transpose(rows, at + 192, scales); }
  };
  using Block = BlockOf<const uint8_t* const*>;
};

// The signed table holds twice the e2m1 values, the unsigned one 12 more.
alignas(16) constexpr uint8_t kE2M1Raised[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
template <bool kSigned>
inline V e2m1_table() {
  return repeat128(load128(kSigned ? static_cast<const void*>(q::kE2M1Doubled) : kE2M1Raised));
}
#if defined(MILLRACE_HAS_AVX512_VBMI)
// By vpermb, which looks at the low six bits of an index: a table of sixteen, four times over, needs no
// masking of the bits above the nibble.
inline V look_up_low(V table, V t) { return _mm512_permutexvar_epi8(t, table); }
inline V look_up_high(V table, V t) { return _mm512_permutexvar_epi8(shift_right16(t, 4), table); }
// The four nibbles of bytes 0 and 1 (kSecond: 2 and 3) of every dword, in order.
template <bool kSecond>
inline V look_up_in_order(V table, V t) {
  const V first = _mm512_set1_epi64(0x2c2824200c080400);  // bits 0 4 8 12 of either dword
  const V places = kSecond ? add8(first, bytes_of(16)) : first;
  return _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(places, t), table);
}
#else
inline V look_up_low(V table, V t) { return shuffle(table, low_nibbles(t)); }
inline V look_up_high(V table, V t) { return shuffle(table, high_nibbles(t)); }
template <bool kSecond>
inline V look_up_in_order(V table, V t) {
  const V place = repeat128(_mm_setr_epi32(0x01010000, 0x05050404, 0x09090808, 0x0d0d0c0c));
  const V twice = shuffle(t, kSecond ? add8(place, bytes_of(2)) : place);
  const V even = bit_and(twice, words_of(0x000f));
  // even | (odd & 0x0f00)
  return shuffle(table, or_and(even, shift_right16(twice, 4), words_of(0x0f00)));
}
#endif

struct FormatMXFP4 : Plain<q::BlockMXFP4, 24, 12> {
  [[gnu::always_inline]] static void block_scales(const uint8_t* block, F* d, F*) { *d = e8m0_floats(block); }
  static void scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float*) {
    e8m0_scales<kBlockBytes>(rows, first, runs, d);
  }
  template <class Rows>
  struct BlockOf {
    Rows rows;
    int64_t at;
    template <int, bool kSigned>
    [[gnu::always_inline]] void unpack(V* u, int = 0) {
      const V table = e2m1_table<kSigned>();
      V t[4];
      transpose(rows, at + 1, t);
      unroll<4>([&](auto j) {
        u[j] = look_up_low(table, t[j]);
        u[4 + j] = look_up_high(table, t[j]);
      });
    }
  };
  using Block = BlockOf<const uint8_t* const*>;
};

// Elements 2 i and 2 i + 1 share byte i: four bits apart, all eight of a dword in order.
struct FormatMXFP4Split : Plain<q::BlockMXFP4Split, 24, 12> {
  static constexpr bool kSplit = true, kEven = false;
  static void scales(const uint8_t* const* scale_rows, int64_t first, int64_t runs, float* d, float*) {
    e8m0_scales<1>(scale_rows, first, runs, d);
  }
  struct Block {
    const uint8_t* const* rows;
    int64_t at;
    template <int, bool kSigned>
    [[gnu::always_inline]] void unpack(V* u, int = 0) {
      const V table = e2m1_table<kSigned>();
      V t[4];
      transpose(rows, at, t);
      unroll<4>([&](auto j) {
        u[2 * j] = look_up_in_order<false>(table, t[j]);
        u[2 * j + 1] = look_up_in_order<true>(table, t[j]);
      });
    }
  };
};

// run(part, group) for the runs of a stored block in order, the groups written out or in a loop.
template <class Format, bool kWrittenOut, class F>
[[gnu::always_inline]] inline void each_run(F run) {
  constexpr int kGroups = Format::kRuns / Format::kParts;
  const auto group = [&](int g) __attribute__((always_inline)) {
    unroll_constants<Format::kParts>([&](auto part) __attribute__((always_inline)) { run(part, g); });
  };
  if constexpr (kWrittenOut) {
    unroll<kGroups>([&](auto g) __attribute__((always_inline)) { group(g); });
  } else {
    for (int g = 0; g < kGroups; ++g) group(g);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
#if defined(MILLRACE_SIMD_AVX512)
// No other form of products is in such a table.
namespace millrace::cpu::MILLRACE_TARGET {
namespace {
using namespace lane;  // NOLINT(google-build-using-namespace)
}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
#endif
