// What a cache of one byte per value gives back: fp8's power of two per head, and what no head may do to it.
#include "kernels/quant/kv_types.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace millrace {
namespace {

TEST(KvTypes, TheLargestReachesTheLastBinade) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int exponent = -60; exponent <= 30; ++exponent) {
    std::vector<float> x(64);
    float largest = 0.0f;
    for (float& v : x) {
      v = std::ldexp(normal(random), exponent);
      largest = std::max(largest, std::fabs(v));
    }
    std::vector<uint8_t> codes(x.size());
    const uint8_t scale = to_fp8_codes(x.data(), 64, codes.data(), 1);
    const int k = scale - 127;
    ASSERT_GE(k, kFp8MinExponent);
    ASSERT_LE(k, kFp8MaxExponent);
    const float scaled = std::ldexp(largest, -k);
    if (k < kFp8MaxExponent) {
      EXPECT_LE(scaled, 448.0f) << exponent;
    }
    if (k > kFp8MinExponent) {
      EXPECT_GT(scaled, 224.0f) << exponent;
    }
    if (k == kFp8MinExponent || k == kFp8MaxExponent) continue;
    for (size_t i = 0; i < x.size(); ++i) {
      // Half a step: of four bits, or of the smallest numbers, 2^-9.
      const float got = std::ldexp(to_float(Fp8E4M3{codes[i]}), k);
      EXPECT_LE(std::fabs(got - x[i]), std::max(std::fabs(x[i]) * 0x1p-4f, std::ldexp(0x1p-10f, k)));
    }
  }
}

TEST(KvTypes, TheBorderIs448) {
  const auto scale_of = [](float x) { return fp8_scale_bits(std::bit_cast<uint32_t>(x)) - 127; };
  EXPECT_EQ(scale_of(448.0f), 0);
  EXPECT_EQ(scale_of(std::nextafter(448.0f, 500.0f)), 1);
  EXPECT_EQ(scale_of(224.0f), -1);
  EXPECT_EQ(scale_of(0.0f), kFp8MinExponent);
  EXPECT_EQ(scale_of(1e-30f), kFp8MinExponent);
  EXPECT_EQ(scale_of(57344.0f), kFp8MaxExponent);
  EXPECT_EQ(scale_of(1e30f), kFp8MaxExponent);  // becomes 57,344
  std::vector<float> x = {1e30f, -1.0f, 0.0f};
  round_to_kv_type(DType::kF8E4M3, x.data(), 3);
  EXPECT_EQ(x, (std::vector<float>{57344.0f, -1.0f, 0.0f}));
}

// Without a scale e4m3 would make 448 of the first and nothing of the second.
TEST(KvTypes, LargeAndSmallHeadsKeepTheirPrecision) {
  for (const float size : {3000.0f, 1e-4f}) {
    std::vector<float> x;
    for (int i = 0; i < 48; ++i) x.push_back(size * (1.0f + static_cast<float>(i) / 48.0f));
    std::vector<float> rounded = x;
    round_to_kv_type(DType::kF8E4M3, rounded.data(), 48);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(rounded[i], x[i], x[i] / 16);
  }
}

// Whatever a value becomes is a bf16 number: a GPU's kernels multiply it as one.
TEST(KvTypes, EveryValueIsABf16Number) {
  std::mt19937 random(4);
  for (int i = 0; i < 200; ++i) {
    std::vector<float> x(64);
    for (float& v : x) {
      v = std::ldexp(static_cast<float>(random() % 2000) - 1000.0f, static_cast<int>(random() % 50) - 40);
    }
    round_to_kv_type(DType::kF8E4M3, x.data(), 64);
    for (const float v : x) EXPECT_EQ(to_float(to_bfloat16(v)), v);
  }
}

TEST(KvTypes, DamageStaysVisible) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = {1.0f, bad, -2.0f, 0.0f};
    round_to_kv_type(DType::kF8E4M3, x.data(), 4);
    for (const float v : x) EXPECT_TRUE(std::isnan(v));
  }
}

// An int8 block of before, read as one of now, would be nonsense: its name must not be the same.
TEST(KvTypes, LayoutsHaveNamesOfTheirOwn) {
  EXPECT_EQ(kv_layout_name(DType::kBF16), info(DType::kBF16).name);
  EXPECT_NE(kv_layout_name(DType::kQ8_0), info(DType::kQ8_0).name);
}

TEST(KvTypes, BytesOfAHead) {
  EXPECT_EQ(kv_head_bytes(DType::kBF16, 64), 128u);
  EXPECT_EQ(kv_head_bytes(DType::kF8E4M3, 64), 65u);
  EXPECT_EQ(kv_head_bytes(DType::kQ8_0, 64), 68u);
}

}  // namespace
}  // namespace millrace
