// Byte layouts of the block-quantized weight types, as they lie in files. Plain structs without alignment,
// for host and device code alike; all numbers are little-endian. Sixteen-bit floats are kept as their bits.
//
// Nibble order, wherever not said otherwise: byte j of a 16-byte group holds element j in its low and element
// j + 16 in its high half.
#pragma once

#include <cstdint>

namespace millrace::quant {

inline constexpr int kBlock = 32;  // elements of a plain block
inline constexpr int kSuperBlock =
    256;  // elements of a K block: 8 sub-blocks of 32 (Q4_K, Q5_K), 16 of 16 (Q2_K, Q3_K, Q6_K)
inline constexpr int kNvBlock = 64;  // elements of an NVFP4 block: 4 sub-blocks of 16

#pragma pack(push, 1)

// x = d * q
struct BlockQ8_0 {
  uint16_t d;  // f16
  int8_t q[kBlock];
};

// x = d * (q - 8)
struct BlockQ4_0 {
  uint16_t d;
  uint8_t q[kBlock / 2];
};

// x = d * q + m
struct BlockQ4_1 {
  uint16_t d, m;
  uint8_t q[kBlock / 2];
};

// x = d * (q - 16); bit j of `high` is the fifth bit of element j
struct BlockQ5_0 {
  uint16_t d;
  uint8_t high[4];
  uint8_t q[kBlock / 2];
};

// x = d * q + m
struct BlockQ5_1 {
  uint16_t d, m;
  uint8_t high[4];
  uint8_t q[kBlock / 2];
};

// x = (d * scale[s]) * q - (dmin * min[s]), s = element / 32.
// scales packs eight 6-bit scales and eight 6-bit mins (scale_min_k4 below). q holds four runs of 32 bytes:
// run r has sub-block 2r in the low and sub-block 2r + 1 in the high nibbles.
struct BlockQ4_K {
  uint16_t d, dmin;
  uint8_t scales[12];
  uint8_t q[kSuperBlock / 2];
};

// As Q4_K; bit s of high[i] is the fifth bit of element 32 s + i.
struct BlockQ5_K {
  uint16_t d, dmin;
  uint8_t scales[12];
  uint8_t high[kSuperBlock / 8];
  uint8_t q[kSuperBlock / 2];
};

// x = (d * scale[element / 16]) * (q - 32). In each half h of 128 elements, element 32 r + i (r < 4, i < 32)
// has its low four bits in low[64 h + 32 (r & 1) + i], nibble r >> 1, and its high two in high[32 h + i] >> 2
// r.
struct BlockQ6_K {
  uint8_t low[kSuperBlock / 2];
  uint8_t high[kSuperBlock / 4];
  int8_t scales[kSuperBlock / 16];
  uint16_t d;
};

// x = d * (q - z): Q4_1 in the bytes of Q4_0. `dz` has the scale in its upper nine bits, d = (1 + mantissa /
// 16) * 2^(exponent - 24), exponent above mantissa, and in the lower seven the zero point in eighths of a
// step (q4_z_scale, q4_z_min). Every pattern is finite. Q4_K keeps its scales in as few bits, but wants rows
// in 256s.
struct BlockQ4_Z {
  uint16_t dz;
  uint8_t q[kBlock / 2];
};

// x = 2^(e - 127) * e2m1[q]
struct BlockMXFP4 {
  uint8_t e;  // e8m0
  uint8_t q[kBlock / 2];
};

// The same without its scale, which lies in a tensor of its own. Low nibble = even element, high = odd.
struct BlockMXFP4Split {
  uint8_t q[kBlock / 2];
};

// x = (d * (scales[s] & 15)) * q - (dmin * (scales[s] >> 4)), s = element / 16. In each half h of 128
// elements, element 32 r + i (r < 4, i < 32) is bits 2 r of q[32 h + i]: pair_code below.
struct BlockQ2_K {
  uint8_t scales[kSuperBlock / 16];
  uint8_t q[kSuperBlock / 4];
  uint16_t d, dmin;
};

// x = (d * (scale[element / 16] - 32)) * (q - 4): two bits as in Q2_K, the third of element 32 s + i is bit s
// of high[i]. scales packs sixteen 6-bit scales (scale_k3 below).
struct BlockQ3_K {
  uint8_t high[kSuperBlock / 8];
  uint8_t q[kSuperBlock / 4];
  uint8_t scales[12];
  uint16_t d;
};

// x = d * kIQ4Levels[q]
struct BlockIQ4_NL {
  uint16_t d;
  uint8_t q[kBlock / 2];
};

// x = (d * (scale[s] - 32)) * kIQ4Levels[q], s = element / 32; scales of 4 bits and, above them, 2
// (scale_iq4_xs below). q holds the nibble groups of the eight sub-blocks.
struct BlockIQ4_XS {
  uint16_t d, scales_high;
  uint8_t scales_low[kSuperBlock / 64];
  uint8_t q[kSuperBlock / 2];
};

// The codebook types: an index names eight magnitudes (four, of IQ3), a bit each a sign. Where signs have
// seven bits, the eighth makes their number even (signs_of_7).

// x = d * (0.5 + scale) / 4 * entry. Per 32 elements: four bytes of indices, a word of four times seven
// signs and four bits of scale.
struct BlockIQ2_XXS {
  uint16_t d;
  uint32_t q[kSuperBlock / 32][2];
};

// The same with nine bits of index below seven of signs, and a scale per 16 (nibbles, low first).
struct BlockIQ2_XS {
  uint16_t d;
  uint16_t q[kSuperBlock / 8];
  uint8_t scales[kSuperBlock / 32];
};

// Eight bits of index and two more (pairs of `high`, low first), eight of signs, a scale per 16.
struct BlockIQ2_S {
  uint16_t d;
  uint8_t q[kSuperBlock / 8];
  uint8_t signs[kSuperBlock / 8];
  uint8_t high[kSuperBlock / 32];
  uint8_t scales[kSuperBlock / 32];
};

// x = d * (0.5 + scale) / 2 * entry, entries of four; signs and scales as IQ2_XXS has them.
struct BlockIQ3_XXS {
  uint16_t d;
  uint8_t q[kSuperBlock / 4];
  uint32_t signs[kSuperBlock / 32];
};

// x = d * (1 + 2 scale) * entry, entries of four: eight bits of index and a ninth, eight of signs, a scale
// per 32 (nibbles, low first).
struct BlockIQ3_S {
  uint16_t d;
  uint8_t q[kSuperBlock / 4];
  uint8_t high[kSuperBlock / 32];
  uint8_t signs[kSuperBlock / 8];
  uint8_t scales[kSuperBlock / 64];
};

// x = d * (1 + 2 scale) * (entry +- 1/8). `high`, per 32 elements: three more bits for each of four indices,
// three of scale, the sign of the eighth.
struct BlockIQ1_S {
  uint16_t d;
  uint8_t q[kSuperBlock / 8];
  uint16_t high[kSuperBlock / 32];
};

// The same with a nibble per index (three more bits, the sign of the eighth), three bits of scale per 16 and
// the f16 in the upper four bits of the four words of scales, lowest first.
struct BlockIQ1_M {
  uint8_t q[kSuperBlock / 8];
  uint8_t high[kSuperBlock / 16];
  uint16_t scales[kSuperBlock / 64];
};

// x = d * (digit - 1). A byte is a fraction of 256 whose first five digits to base three are elements i,
// i + 32 ... of the first 160 (q[i]), i + 16 ... of the next 80 (q[32 + i]), i + 4 ... of the last 16
// (high[i], four digits).
struct BlockTQ1_0 {
  uint8_t q[48];
  uint8_t high[4];
  uint16_t d;
};

// x = d * (q - 1), codes as Q2_K has them.
struct BlockTQ2_0 {
  uint8_t q[kSuperBlock / 4];
  uint16_t d;
};

// x = scale[s] * e2m1[q], s = element / 16; scales are e4m3 without a sign (ue4m3_units below). Byte
// 8 s + j holds elements j and j + 8 of sub-block s.
struct BlockNVFP4 {
  uint8_t scales[kNvBlock / 16];
  uint8_t q[kNvBlock / 2];
};

#pragma pack(pop)

static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockQ4_Z) == 18);
static_assert(sizeof(BlockMXFP4) == 17 && sizeof(BlockMXFP4Split) == 16);
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110);
static_assert(sizeof(BlockIQ4_NL) == 18 && sizeof(BlockIQ4_XS) == 136);
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110);
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82);
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56);
static_assert(sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66 && sizeof(BlockNVFP4) == 36);

// The levels of IQ4_NL and IQ4_XS: closer together where weights are many.
inline constexpr int8_t kIQ4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

// Twice the value of each e2m1 code: small integers, so that products of them are exact.
inline constexpr int8_t kE2M1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The scale of a Q4_Z block as the bits of a float32: nine bits in place, and the exponent's other bias.
inline constexpr uint32_t kQ4ZScaleBias = (127 - 24) << 23;
constexpr uint32_t q4_z_scale_bits(uint16_t dz) { return (uint32_t{dz} >> 7 << 19) + kQ4ZScaleBias; }
// What is added to d * q, in units of d: at most 0, and exact.
constexpr float q4_z_min(uint16_t dz) { return -0.125f * static_cast<float>(dz & 127); }

// Scale and min (6 bits each) of sub-block s of a Q4_K or Q5_K block. Sub-blocks 0-3 lie in the low six bits
// of scales[s] and scales[s + 4]; 4-7 have their low nibbles in scales[s + 4] and their two high bits on top
// of those of s - 4.
constexpr void scale_min_k4(const uint8_t* scales, int s, uint8_t* scale, uint8_t* min) {
  if (s < 4) {
    *scale = scales[s] & 63;
    *min = scales[s + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((scales[s + 4] & 15) | (scales[s - 4] >> 6) << 4);
    *min = static_cast<uint8_t>((scales[s + 4] >> 4) | (scales[s] >> 6) << 4);
  }
}

// Two bits of element e of Q2_K, Q3_K and TQ2_0.
constexpr int pair_code(const uint8_t* q, int e) {
  return (q[e / 128 * 32 + e % 32] >> (e / 32 % 4 * 2)) & 3;
}

// Scale of sub-block s < 16 of a Q3_K block, six bits: four in a nibble of the first eight bytes, two in the
// last four.
constexpr int scale_k3(const uint8_t* scales, int s) {
  return ((scales[s % 8] >> (s / 8 * 4)) & 15) | ((scales[8 + s % 4] >> (s / 4 * 2)) & 3) << 4;
}

// Scale of sub-block s < 8 of an IQ4_XS block, six bits.
constexpr int scale_iq4_xs(const BlockIQ4_XS& b, int s) {
  return ((b.scales_low[s / 2] >> (s % 2 * 4)) & 15) | ((b.scales_high >> (2 * s)) & 3) << 4;
}

// Eight signs from seven bits: a set bit is a minus, and minuses are even in number.
constexpr uint8_t signs_of_7(uint32_t bits) {
  return static_cast<uint8_t>(bits | static_cast<uint32_t>(__builtin_parity(bits)) << 7);
}

// The e4m3 scale of an NVFP4 sub-block in units of 2^-9: an integer. The sign bit is nothing; the NaN without
// it counts as zero.
constexpr int32_t ue4m3_units(uint8_t bits) {
  if (bits == 0x7f) return 0;
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  return exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
}

}  // namespace millrace::quant
