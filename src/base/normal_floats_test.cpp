#include "base/normal_floats.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <random>

namespace millrace {
namespace {

#if defined(__GLIBCXX__)
TEST(NormalFloats, AreThoseOfTheLibraryToTheBit) {
  for (const float scale : {1.0f, 0.02f, 300.0f}) {
    std::mt19937 ours(7), theirs(7);
    NormalFloats normal(scale);
    std::normal_distribution<float> library(0.0f, scale);
    for (int i = 0; i < 5000; ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(normal(ours)), std::bit_cast<uint32_t>(library(theirs))) << i;
    EXPECT_EQ(ours(), theirs());  // as many were drawn
  }
}
#endif

TEST(NormalFloats, HaveTheirMeanAndVariance) {
  std::mt19937 random(3);
  NormalFloats normal(2.0f);
  double sum = 0, squares = 0;
  constexpr int kCount = 20000;
  for (int i = 0; i < kCount; ++i) {
    const double x = normal(random);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.1);
  EXPECT_NEAR(squares / kCount, 4.0, 0.2);
}

}  // namespace
}  // namespace millrace
