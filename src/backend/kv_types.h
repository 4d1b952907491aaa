// KV caches of one byte per value, beside F32, F16 and BF16:
//   int8 (DType::kQ8_0)   32 dimensions of a token's head share an f16 scale, amax / 127
//   fp8  (DType::kF8E4M3) no scale: e4m3 reaches 448 with four bits of precision, keys and values stay below
// What a value becomes is defined here, once, for the devices and for `reference`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

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

// 32 values to codes and the bits of their scale. A NaN or an infinity makes all of them NaN.
inline uint16_t to_int8_codes(const float* x, int8_t* codes) {
  float most = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < kKvScaleDims; ++i) {
    finite = finite && std::isfinite(x[i]);
    most = std::max(most, std::fabs(x[i]));
  }
  const Half scale = to_half(most / 127.0f);
  const float d = to_float(scale);
  finite = finite && std::isfinite(d);
  for (int64_t i = 0; i < kKvScaleDims; ++i) {
    const float steps = finite && d > 0.0f ? std::clamp(std::nearbyint(x[i] / d), -127.0f, 127.0f) : 0.0f;
    codes[i] = static_cast<int8_t>(finite ? steps : 1.0f);
  }
  return finite ? scale.bits : uint16_t{0x7e00};
}

// What a cache of that type gives back for `count` values of one head (a multiple of 32 for int8).
inline void round_to_kv_type(DType type, float* x, int64_t count) {
  if (type == DType::kF8E4M3) {
    for (int64_t i = 0; i < count; ++i) x[i] = to_float(Fp8E4M3{to_e4m3(x[i])});
  } else if (type == DType::kQ8_0) {
    for (int64_t at = 0; at < count; at += kKvScaleDims) {
      int8_t codes[kKvScaleDims];
      const float d = to_float(Half{to_int8_codes(x + at, codes)});
      for (int64_t i = 0; i < kKvScaleDims; ++i) x[at + i] = static_cast<float>(codes[i]) * d;
    }
  }
}

}  // namespace millrace
