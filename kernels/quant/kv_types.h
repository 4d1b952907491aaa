// KV caches of one byte per value, beside F32, F16 and BF16:
//   int8 (DType::kQ8_0)   32 dimensions of a token's head share an f16 scale, amax / 127
//   fp8  (DType::kF8E4M3) the dimensions of a token's head share a power of two, the largest of them just
//                         reaches e4m3's last binade: in four bits of precision nothing is lost to range
// What a value becomes is defined here, once, for the devices and for `reference`. Scales are of one token:
// what is stored depends on nobody else, so chunks and batches leave the same bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/float_bits.h"
#include "tensor/dtype.h"

namespace millrace {

inline constexpr int64_t kKvScaleDims = 32;

// What people call them.
struct KvTypeName {
  std::string_view name;
  DType type;
};
inline constexpr KvTypeName kKvTypeNames[] = {{"f32", DType::kF32},
                                              {"f16", DType::kF16},
                                              {"bf16", DType::kBF16},
                                              {"int8", DType::kQ8_0},
                                              {"fp8", DType::kF8E4M3}};
inline std::string_view kv_type_name(DType type) {
  for (const KvTypeName& known : kKvTypeNames) {
    if (known.type == type) return known.name;
  }
  return info(type).name;
}

// Names what the bytes of a block mean, for caches that outlive the process: a number is added where they
// move.
inline std::string kv_layout_name(DType type) {
  return std::string(info(type).name) + (type == DType::kQ8_0 ? " 2" : "");
}

// Bytes of one token's head, key or value, all devices alike: a block is 16 of them per head.
inline size_t kv_head_bytes(DType type, int64_t head_dim) {
  return bytes_of(type, head_dim) + (type == DType::kF8E4M3 ? 1 : 0);  // its scale
}

// fp8's scale as e8m0, 2^(bits - 127), from the bits of the largest magnitude of a head: the least power of
// two that brings it to at most 448, between 2^-32 and 2^7. That way a value is a bf16 number exactly, and so
// is 2^120 times the scale, which the GPU's kernels count on; beyond 57,344, as in f16 beyond 65,504, there
// is no further. Of a head with a NaN or an infinity it is infinite and the codes are zeros: all are NaN.
inline constexpr int kFp8MinExponent = -32, kFp8MaxExponent = 7;
inline constexpr uint8_t kFp8NotFinite = 255;
constexpr uint8_t fp8_scale_bits(uint32_t largest) {
  const auto exponent = static_cast<int>(largest >> 23);
  if (exponent == 255) return kFp8NotFinite;
  const int above = (largest & 0x7fffffu) > 0x600000u ? 1 : 0;  // 1.75 x 2^8 is 448
  const int k = exponent - 127 - 8 + above;
  return static_cast<uint8_t>(127 + (k < kFp8MinExponent   ? kFp8MinExponent
                                     : k > kFp8MaxExponent ? kFp8MaxExponent
                                                           : k));
}
// The scale, and what values are multiplied with to become codes: zero where there are none. Both as float32
// bits.
constexpr uint32_t fp8_scale(uint8_t bits) { return static_cast<uint32_t>(bits) << 23; }
constexpr uint32_t fp8_inverse_scale(uint8_t bits) {
  return bits == kFp8NotFinite ? 0u : static_cast<uint32_t>(254 - bits) << 23;
}

// To nearest even; magnitudes above 448 become 448, NaN stays NaN.
inline uint8_t to_e4m3(float x) {
  const auto sign = static_cast<uint8_t>(std::signbit(x) ? 0x80 : 0);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return static_cast<uint8_t>(sign | 0x7f);
  if (magnitude >= 448.0f) return static_cast<uint8_t>(sign | 0x7e);
  // Subnormals are steps of 2^-9, which is also the step of the first normal exponent.
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const float step = std::ldexp(1.0f, exponent - 3);
  const auto steps = static_cast<int>(std::nearbyint(magnitude / step));  // 16 carries into the exponent
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + steps));
}

// The values of one head to codes, `stride` bytes apart; returns their scale.
inline uint8_t to_fp8_codes(const float* x, int64_t count, uint8_t* codes, int64_t stride) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  const uint8_t scale = fp8_scale_bits(largest);
  const float by = std::bit_cast<float>(fp8_inverse_scale(scale));
  for (int64_t i = 0; i < count; ++i)
    codes[i * stride] = scale == kFp8NotFinite ? uint8_t{0} : to_e4m3(x[i] * by);
  return scale;
}

// 32 values to codes and the bits of their scale. A NaN or an infinity makes all of them NaN.
inline uint16_t to_int8_codes(const float* x, int8_t* codes) {
  float amax = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < kKvScaleDims; ++i) {
    finite = finite && std::isfinite(x[i]);
    amax = std::max(amax, std::fabs(x[i]));
  }
  const Half scale = to_half(amax / 127.0f);
  const float d = to_float(scale);
  finite = finite && std::isfinite(d);
  for (int64_t i = 0; i < kKvScaleDims; ++i) {
    const float steps = finite && d > 0.0f ? std::clamp(std::nearbyint(x[i] / d), -127.0f, 127.0f) : 0.0f;
    codes[i] = static_cast<int8_t>(finite ? steps : 1.0f);
  }
  return finite ? scale.bits : uint16_t{0x7e00};
}

// What a cache of that type gives back for the `count` values of one head (a multiple of 32 for int8).
inline void round_to_kv_type(DType type, float* x, int64_t count) {
  if (type == DType::kF8E4M3) {
    std::vector<uint8_t> codes(static_cast<size_t>(count));
    const float d = std::bit_cast<float>(fp8_scale(to_fp8_codes(x, count, codes.data(), 1)));
    for (int64_t i = 0; i < count; ++i) x[i] = to_float(Fp8E4M3{codes[static_cast<size_t>(i)]}) * d;
  } else if (type == DType::kQ8_0) {
    for (int64_t at = 0; at < count; at += kKvScaleDims) {
      int8_t codes[kKvScaleDims];
      const float d = to_float(Half{to_int8_codes(x + at, codes)});
      for (int64_t i = 0; i < kKvScaleDims; ++i) x[at + i] = static_cast<float>(codes[i]) * d;
    }
  }
}

}  // namespace millrace
