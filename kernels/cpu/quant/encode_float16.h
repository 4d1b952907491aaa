// f16 and bf16 from float32 and back, single values. Million values per second of a Neoverse-N1 core
// (docs/benchmarks.md): f16 1,445, bf16 961.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <cstring>

#include "kernels/cpu/quant/encode_group.h"
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/simd/lanes.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void halves_of(const float* x, uint16_t* out, Misses& misses) {
  const V value = Lanes::load(x);
  const StoredHalves half(value);
  std::memcpy(out, half.bits, sizeof half.bits);
  misses.add(Lanes::sub(value, half.value), value);
}

EncodeSums encode_f16(const float* x, int64_t count, uint8_t* out) {
  constexpr int kWidth = Lanes::kBlocks;
  Misses misses;
  uint16_t bits[kWidth];
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    halves_of(x + i, bits, misses);
    std::memcpy(out + 2 * i, bits, sizeof bits);
  }
  if (i < count) {
    float padded[kWidth] = {};
    std::memcpy(padded, x + i, static_cast<size_t>(count - i) * 4);
    halves_of(padded, bits, misses);
    std::memcpy(out + 2 * i, bits, static_cast<size_t>(count - i) * 2);
  }
  return misses.sums();
}

// Integer arithmetic in loops that every compiler makes vector code of.
EncodeSums encode_bf16(const float* x, int64_t count, uint8_t* out) {
  constexpr int64_t kPiece = 64;
  constexpr int kWidth = Lanes::kBlocks;
  Misses misses;
  for (int64_t done = 0; done < count; done += kPiece) {
    const int64_t n = count - done < kPiece ? count - done : kPiece;
    float padded[kPiece] = {}, back[kPiece];
    uint16_t bits[kPiece];
    std::memcpy(padded, x + done, static_cast<size_t>(n) * 4);
    for (int i = 0; i < kPiece; ++i) {
      const uint32_t u = float_bits(padded[i]);
      const uint32_t rounded_bits = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      bits[i] = static_cast<uint16_t>(rounded_bits);
      back[i] = bits_float(rounded_bits << 16);
    }
    std::memcpy(out + 2 * done, bits, static_cast<size_t>(n) * 2);
    for (int i = 0; i < kPiece; i += kWidth) {
      const V value = Lanes::load(padded + i);
      misses.add(Lanes::sub(value, Lanes::load(back + i)), value);
    }
  }
  return misses.sums();
}

bool widen_f16(const uint8_t* x, int64_t count, float* out) {
  constexpr int kWidth = Lanes::kBlocks;
  uint16_t highest = 0, bits[kWidth];
  for (int64_t i = 0; i < count; ++i) {
    uint16_t magnitude;
    std::memcpy(&magnitude, x + 2 * i, sizeof magnitude);
    magnitude &= 0x7fff;
    highest = magnitude > highest ? magnitude : highest;
  }
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    std::memcpy(bits, x + 2 * i, sizeof bits);
    Lanes::store(out + i, Lanes::load_halves(bits));
  }
  if (i < count) {
    std::memset(bits, 0, sizeof bits);
    std::memcpy(bits, x + 2 * i, static_cast<size_t>(count - i) * 2);
    float last[kWidth];
    Lanes::store(last, Lanes::load_halves(bits));
    std::memcpy(out + i, last, static_cast<size_t>(count - i) * 4);
  }
  return highest < 0x7c00;
}

bool widen_bf16(const uint8_t* x, int64_t count, float* out) {
  uint16_t highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, x + 2 * i, sizeof bits);
    const auto magnitude = static_cast<uint16_t>(bits & 0x7fff);
    highest = magnitude > highest ? magnitude : highest;
    const uint32_t float32 = static_cast<uint32_t>(bits) << 16;
    std::memcpy(out + i, &float32, sizeof float32);
  }
  return highest < 0x7f80;
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
