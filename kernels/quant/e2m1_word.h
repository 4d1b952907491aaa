// Eight e2m1 codes in a word, placed so that few instructions make bf16 values of them. An e2m1 code is a
// bf16 in disguise: with its exponent in the lowest two bits of a bf16's it is 2^-126 times what it means,
// zero and one half included. A word holds its four pairs of elements (2i in the low half) so that three of
// them need a rotation and a mask, and the fourth one multiplication.
#pragma once

#include <cstdint>

#ifndef MILLRACE_HOST_DEVICE
#ifdef __CUDACC__
#define MILLRACE_HOST_DEVICE __host__ __device__
#else
#define MILLRACE_HOST_DEVICE
#endif
#endif

namespace millrace::quant {

// Where bit b (0: mantissa, 1, 2: exponent, 3: sign) of element i lies: rotations of 0, 3 and 6 bring those
// of pairs 0 to 2 where a bf16 has them (the signs of pairs 1 and 2 from the other half of the word). Pair 3
// has the bits that are left, and lies so that one multiplication brings them there.
MILLRACE_HOST_DEVICE inline constexpr int e2m1_bit(int i, int b) {
  constexpr uint32_t kPlaces[4] = {0xf876u, 0x2ba9u, 0x5edcu, 0x1043u};
  const bool crosses = b == 3 && (i / 2 == 1 || i / 2 == 2);
  return static_cast<int>(kPlaces[i / 2] >> (4 * b) & 15u) + 16 * ((i + (crosses ? 1 : 0)) % 2);
}
// Pair 0 to 3 of a word, each element's bits where a bf16 has its sign, the lowest two of its exponent and
// the first of its mantissa. No two bits of the multiplication meet where the mask looks, and none carries
// there.
MILLRACE_HOST_DEVICE inline constexpr uint32_t e2m1_pair(uint32_t word, int pair) {
  constexpr uint32_t kBits = 0x81c081c0u, kLeft = 0x001b001bu, kGather = 1u << 3 | 1u << 8 | 1u << 14;
  if (pair == 0) return word & kBits;
  if (pair < 3) return (word >> (3 * pair) | word << (32 - 3 * pair)) & kBits;
  return (word & kLeft) * kGather & kBits;
}
// Eight codes, nibble i of `codes` element i.
MILLRACE_HOST_DEVICE inline constexpr uint32_t encode_e2m1(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    for (int b = 0; b < 4; ++b) word |= (codes >> (4 * i + b) & 1u) << e2m1_bit(i, b);
  }
  return word;
}
// The code of element i.
MILLRACE_HOST_DEVICE inline constexpr uint32_t decode_e2m1(uint32_t word, int i) {
  uint32_t code = 0;
  for (int b = 0; b < 4; ++b) code |= (word >> e2m1_bit(i, b) & 1u) << b;
  return code;
}

}  // namespace millrace::quant
