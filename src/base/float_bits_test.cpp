// Every pattern of the small floats against a formula that shares nothing with the code: sign * m * 2^e by
// ldexp.
#include "base/float_bits.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace millrace {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Value of a float with `exponent_bits` and `mantissa_bits`, IEEE-style, infinities and NaN at the top
// exponent.
double ieee_value(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa == 0 ? sign * kInfinity : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

bool same(double expected, float found) {
  if (std::isnan(expected)) return std::isnan(found);
  return expected == static_cast<double>(found) && std::signbit(expected) == std::signbit(found);
}

TEST(FloatBits, EveryHalf) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(Half{static_cast<uint16_t>(bits)});
    ASSERT_TRUE(same(ieee_value(bits, 5, 10), value)) << bits << " gave " << value;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(to_half(value)))) << bits;
    } else {
      ASSERT_EQ(to_half(value).bits, bits);
    }
  }
}

TEST(FloatBits, EveryBFloat16) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(BFloat16{static_cast<uint16_t>(bits)});
    ASSERT_TRUE(same(ieee_value(bits, 8, 7), value)) << bits << " gave " << value;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(to_bfloat16(value)))) << bits;
    } else {
      ASSERT_EQ(to_bfloat16(value).bits, bits);
    }
  }
}

// No infinities: the top exponent is used for numbers, and only s.1111.111 is NaN.
TEST(FloatBits, EveryE4M3) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const int exponent = static_cast<int>(bits >> 3) & 15;
    const int mantissa = static_cast<int>(bits) & 7;
    double expected = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    if (exponent == 15 && mantissa == 7) expected = std::nan("");
    if (bits & 0x80) expected = -expected;
    EXPECT_TRUE(same(expected, to_float(Fp8E4M3{static_cast<uint8_t>(bits)}))) << bits;
  }
  EXPECT_EQ(to_float(Fp8E4M3{0x7e}), 448.0f);
}

TEST(FloatBits, EveryE8M0) {
  for (int bits = 0; bits < 255; ++bits) {
    EXPECT_TRUE(same(std::ldexp(1.0, bits - 127), to_float(E8M0{static_cast<uint8_t>(bits)}))) << bits;
  }
  EXPECT_TRUE(std::isnan(to_float(E8M0{255})));
}

// Between two neighbours: below the middle goes down, above goes up, the middle goes to the even one.
template <class Small, class Round>
void check_rounding(uint32_t low_bits, Round round) {
  const Small low{static_cast<uint16_t>(low_bits)};
  const Small high{static_cast<uint16_t>(low_bits + 1)};
  // Exact in double, and the middle is exact in float32 too.
  const auto middle = static_cast<float>((static_cast<double>(to_float(low)) + to_float(high)) / 2);
  const uint32_t even = low_bits % 2 == 0 ? low_bits : low_bits + 1;
  ASSERT_EQ(round(middle).bits, even) << low_bits;
  ASSERT_EQ(round(-middle).bits, even | 0x8000u) << low_bits;
  ASSERT_EQ(round(std::nextafterf(middle, 0.0f)).bits, low_bits);
  ASSERT_EQ(round(std::nextafterf(middle, std::numeric_limits<float>::infinity())).bits, low_bits + 1);
}

TEST(FloatBits, HalfRoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) check_rounding<Half>(bits, to_half);
  // The largest half is 65504; from 65520 on the nearest is infinity.
  EXPECT_EQ(to_half(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_half(-std::numeric_limits<float>::max()).bits, 0xfc00);
  EXPECT_EQ(to_half(std::numeric_limits<float>::denorm_min()).bits, 0);
}

TEST(FloatBits, BFloat16RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) check_rounding<BFloat16>(bits, to_bfloat16);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  // A NaN whose only set bits are dropped must not become infinity.
  EXPECT_EQ(to_bfloat16(std::bit_cast<float>(0x7f800001u)).bits & 0x7fu, 0x40u);
}

}  // namespace
}  // namespace millrace
