#include "synth/fill.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/float_bits.h"
#include "kernels/quant/blocks.h"

namespace millrace::cli {
namespace {

class Random {
 public:
  Random(uint64_t seed, uint64_t piece)
      : state_(seed * 0x9e3779b97f4a7c15u ^ (piece + 1) * 0xd1342543de82ef95u) {
    next();
  }
  uint64_t next() {  // xorshift64*, with a Weyl-free guard against the zero state
    state_ |= state_ == 0 ? 1 : 0;
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  template <size_t n>
  void fill(uint8_t (&bytes)[n]) {
    for (size_t i = 0; i < n; i += 8) {
      const uint64_t word = next();
      std::memcpy(bytes + i, &word, std::min<size_t>(8, n - i));
    }
  }

 private:
  uint64_t state_;
};

uint16_t half(double value) { return to_half(static_cast<float>(value)).bits; }

template <class Block, class Make>
void fill_blocks(std::byte* out, size_t bytes, Make&& make) {
  for (size_t i = 0; i < bytes; i += sizeof(Block)) {
    Block block;
    make(block);
    std::memcpy(out + i, &block, sizeof(block));
  }
}

void fill_q8_0(double sigma, Random& random, std::byte* out, size_t bytes) {
  // Seven-bit signed numbers, [-64, 63]: their rms is 37. Bit 6 is copied to bit 7, eight bytes at a time.
  const uint16_t d = half(sigma / 37.0);
  fill_blocks<quant::BlockQ8_0>(out, bytes, [&](quant::BlockQ8_0& block) {
    block.d = d;
    for (int i = 0; i < quant::kBlock; i += 8) {
      const uint64_t word = random.next();
      const uint64_t extended = (word & 0x7f7f7f7f7f7f7f7fu) | ((word & 0x4040404040404040u) << 1);
      std::memcpy(block.q + i, &extended, 8);
    }
  });
}

void fill_mxfp4(double sigma, Random& random, std::byte* out, size_t bytes) {
  // The rms of uniformly drawn e2m1 codes is 2.93; scales take the power of two next to it, or its neighbour.
  const int exponent = static_cast<int>(std::lround(std::log2(sigma / 2.93)));
  fill_blocks<quant::BlockMXFP4>(out, bytes, [&](quant::BlockMXFP4& block) {
    random.fill(block.q);
    block.e =
        static_cast<uint8_t>(std::clamp(127 + exponent - static_cast<int>(random.next() >> 63), 1, 254));
  });
}

// The types with one scale and perhaps one minimum per 32: q is uniform in [0, levels), centred by type or
// min.
template <class Block>
void fill_simple(double sigma, int levels, Random& random, std::byte* out, size_t bytes) {
  const double step =
      sigma * std::sqrt(12.0) / levels;  // rms of a uniform distribution is its width / sqrt(12)
  fill_blocks<Block>(out, bytes, [&](Block& block) {
    random.fill(block.q);
    block.d = half(step);
    if constexpr (requires { block.m; }) block.m = half(-step * (levels - 1) / 2.0);
    if constexpr (requires { block.high; }) random.fill(block.high);
  });
}

void fill_q4_z(double sigma, Random& random, std::byte* out, size_t bytes) {
  const auto step = static_cast<float>(sigma * std::sqrt(12.0) / 16.0);
  const int64_t bits = (int64_t{std::bit_cast<uint32_t>(step)} - int64_t{quant::kQ4ZScaleBias}) >> 19;
  const auto dz = static_cast<uint16_t>(std::clamp<int64_t>(bits, 0, 511) << 7 | 60);  // 7.5: the middle
  fill_blocks<quant::BlockQ4_Z>(out, bytes, [&](quant::BlockQ4_Z& block) {
    random.fill(block.q);
    block.dz = dz;
  });
}

// Q4_K and Q5_K: x = d * scale * q - dmin * min with uniform 6-bit scale and min; dmin centres it on average.
template <class Block>
void fill_k(double sigma, int levels, Random& random, std::byte* out, size_t bytes) {
  const double middle = (levels - 1) / 2.0;
  // Mean squares: scale^2 is 1323 (0..63), q^2 about levels^2 / 3; min's spread is 341 around its mean.
  const double spread =
      std::sqrt(1323.0 * levels * levels / 3.0 - std::pow(31.5 * middle, 2) + 341.0 * middle * middle);
  fill_blocks<Block>(out, bytes, [&](Block& block) {
    random.fill(block.scales);
    random.fill(block.q);
    if constexpr (requires { block.high; }) random.fill(block.high);
    block.d = half(sigma / spread);
    block.dmin = half(sigma / spread * middle);
  });
}

void fill_q6_k(double sigma, Random& random, std::byte* out, size_t bytes) {
  fill_blocks<quant::BlockQ6_K>(out, bytes, [&](quant::BlockQ6_K& block) {
    random.fill(block.low);
    random.fill(block.high);
    uint8_t scales[sizeof(block.scales)];
    random.fill(scales);
    std::memcpy(block.scales, scales, sizeof(scales));
    block.d = half(sigma / (74.0 * 18.5));  // rms of a signed byte, and of q - 32
  });
}

// Plain floats, uniform in +-sqrt(3) sigma: four 16-bit numbers of each draw.
template <class Value, class Convert>
void fill_floats(double sigma, Random& random, std::byte* out, size_t bytes, Convert&& convert) {
  const float scale = static_cast<float>(sigma * std::sqrt(3.0) / 32768.0);
  uint64_t word = 0;
  for (size_t i = 0; i < bytes / sizeof(Value); ++i) {
    word = i % 4 == 0 ? random.next() : word >> 16;
    const Value value = convert(static_cast<float>(static_cast<int16_t>(word & 0xffff)) * scale);
    std::memcpy(out + i * sizeof(Value), &value, sizeof(Value));
  }
}

}  // namespace

bool can_fill(DType type) {
  return type <= DType::kQ4_Z && type != DType::kF8E4M3 && type != DType::kMXFP4Split;
}

void fill_random(DType type, double sigma, uint64_t seed, uint64_t piece, std::byte* out, size_t bytes) {
  Random random(seed, piece);
  switch (type) {
    case DType::kF32:
      return fill_floats<float>(sigma, random, out, bytes, [](float x) { return x; });
    case DType::kF16:
      return fill_floats<Half>(sigma, random, out, bytes, [](float x) { return to_half(x); });
    case DType::kBF16:
      return fill_floats<BFloat16>(sigma, random, out, bytes, [](float x) { return to_bfloat16(x); });
    case DType::kQ8_0:
      return fill_q8_0(sigma, random, out, bytes);
    case DType::kQ4_0:
      return fill_simple<quant::BlockQ4_0>(sigma, 16, random, out, bytes);
    case DType::kQ4_1:
      return fill_simple<quant::BlockQ4_1>(sigma, 16, random, out, bytes);
    case DType::kQ5_0:
      return fill_simple<quant::BlockQ5_0>(sigma, 32, random, out, bytes);
    case DType::kQ5_1:
      return fill_simple<quant::BlockQ5_1>(sigma, 32, random, out, bytes);
    case DType::kQ4_K:
      return fill_k<quant::BlockQ4_K>(sigma, 16, random, out, bytes);
    case DType::kQ5_K:
      return fill_k<quant::BlockQ5_K>(sigma, 32, random, out, bytes);
    case DType::kQ6_K:
      return fill_q6_k(sigma, random, out, bytes);
    case DType::kQ4_Z:
      return fill_q4_z(sigma, random, out, bytes);
    case DType::kMXFP4:
      return fill_mxfp4(sigma, random, out, bytes);
    default:
      MILLRACE_CHECK(can_fill(type));
  }
}

}  // namespace millrace::cli
