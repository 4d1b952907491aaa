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
    256;  // elements of a K block: 8 sub-blocks of 32 (Q4_K, Q5_K), 16 of 16 (Q6_K)

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

#pragma pack(pop)

static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockQ4_Z) == 18);
static_assert(sizeof(BlockMXFP4) == 17 && sizeof(BlockMXFP4Split) == 16);

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

}  // namespace millrace::quant
