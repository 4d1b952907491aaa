// Bit types of the small floats and their conversions to and from float32, in plain integer arithmetic so
// that host, device and every instruction set agree to the bit. Rounding is to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

namespace millrace {

struct Half {
  uint16_t bits;
};  // IEEE binary16: 1-5-10
struct BFloat16 {
  uint16_t bits;
};  // 1-8-7: the upper half of a float32
struct Fp8E4M3 {
  uint8_t bits;
};  // 1-4-3, bias 7, no infinity, NaN is s.1111.111, largest 448
struct E8M0 {
  uint8_t bits;
};  // 2^(bits - 127), NaN is 255

inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline BFloat16 to_bfloat16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // keep NaN a NaN
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: magnitude * 2^-24 is exact in float32.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline Half to_half(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 aligns the last kept bit with float32's, and the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

inline float to_float(Fp8E4M3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 0x08u) return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000u));
  const float value = static_cast<float>(magnitude) * 0x1p-9f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// To nearest, even where two are as near; beyond +-448 it stays there.
inline Fp8E4M3 to_fp8_e4m3(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>(u >> 24 & 0x80u);
  uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;  // 448
  if (magnitude < 0x3c800000u) {
    // Subnormal: adding 2^14 aligns the last kept bit, 2^-9, with float32's, and the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return {static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u))};
  }
  const uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  return {static_cast<uint8_t>(sign | ((rounded - 0x3c000000u) >> 20))};
}

inline float to_float(E8M0 x) {
  if (x.bits == 255) return std::bit_cast<float>(0x7fc00000u);
  if (x.bits == 0) return 0x1p-127f;
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 23);
}

}  // namespace millrace
