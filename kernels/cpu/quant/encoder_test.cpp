// The encoders against what their formats allow: never worse than round-to-nearest, close to the error that
// the number of levels implies, exact on what the format can hold, and blind to how rows are grouped.
#include "kernels/cpu/quant/encoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/normal_floats.h"
#include "kernels/quant/codec.h"

namespace millrace::quant {
namespace {

std::vector<float> gaussian(size_t count, uint32_t seed, float sigma = 0.02f) {
  std::mt19937 random(seed);
  NormalFloats normal(sigma);
  std::vector<float> x(count);
  for (float& v : x) v = normal(random);
  return x;
}

std::vector<float> there_and_back(DType type, const std::vector<float>& x, int64_t cols,
                                  const float* importance = nullptr) {
  std::vector<std::byte> coded(bytes_of(type, static_cast<int64_t>(x.size())));
  encode_rows(type, x.data(), static_cast<int64_t>(x.size()) / cols, cols, importance, coded.data());
  std::vector<float> back(x.size());
  dequantize(type, coded.data(), back.data(), static_cast<int64_t>(x.size()));
  return back;
}

double relative_rms(const std::vector<float>& x, const std::vector<float>& y,
                    const float* importance = nullptr, size_t cols = 1) {
  double error = 0.0, total = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = importance == nullptr ? 1.0 : importance[i % cols];
    error += w * (x[i] - y[i]) * (x[i] - y[i]);
    total += w * x[i] * x[i];
  }
  return std::sqrt(error / total);
}

// Relative error of Gaussian values in blocks, at most. The largest magnitude of 32 such values is 2.43 sigma
// (root mean square; 2.13 of 16), their two ends lie 4.2 apart, and uniform steps err by step / sqrt(12). So
// a signed type of n levels errs by 2 * 2.43 / n / 3.46 and one with a minimum by 4.2 / (n - 1) / 3.46,
// before any search. The K types add the rounding of their scales, less than a twentieth.
constexpr double signed_error(double extreme, int levels) { return 2.0 * extreme / levels / 3.46; }
constexpr double min_error(int levels) { return 4.2 / (levels - 1) / 3.46; }
struct Bound {
  DType type;
  double highest;
};
const Bound kBounds[] = {{DType::kF16, 0x1p-11},
                         {DType::kBF16, 0x1p-8},
                         {DType::kQ8_0, signed_error(2.43, 254)},
                         {DType::kQ6_K, signed_error(2.13, 64)},
                         {DType::kQ5_K, min_error(32) * 0.95},  // the search gains more than the scales lose
                         {DType::kQ5_1, min_error(32) * 0.9},
                         {DType::kQ5_0, signed_error(2.43, 32) * 0.95},
                         {DType::kQ4_K, min_error(16) * 0.9},
                         {DType::kQ4_1, min_error(16) * 0.9},
                         {DType::kQ4_Z, min_error(16) * 0.92},
                         {DType::kQ4_0, signed_error(2.43, 16) * 0.95},
                         // Lower than Q4_0 and Q4_K by what levels that crowd around zero gain.
                         {DType::kIQ4_NL, signed_error(2.43, 16) * 0.87},
                         {DType::kIQ4_XS, signed_error(2.43, 16) * 0.87},
                         {DType::kQ3_K, signed_error(2.13, 8) * 1.0},
                         {DType::kQ2_K, 3.53 / 3 / 3.46},  // 16 Gaussian values' ends lie 3.53 apart
                         // A value's neighbours are a fifth to a half of it apart: uniform, 0.12 at most.
                         {DType::kMXFP4, 0.12}};

TEST(Encoder, ErrsNoMoreThanTheFormatImplies) {
  const std::vector<float> x = gaussian(64 * 512, 1);
  for (const auto& [type, highest] : kBounds) {
    const double error = relative_rms(x, there_and_back(type, x, 512));
    std::printf("[  figure  ] %-6s relative rms %.5f, bound %.5f\n", std::string(info(type).name).c_str(),
                error, highest);
    EXPECT_LT(error, highest) << info(type).name;
  }
}

TEST(Encoder, IsNeverWorseThanRoundToNearest) {
  for (const DType type : {DType::kQ8_0, DType::kQ5_1, DType::kQ5_0, DType::kQ4_1, DType::kQ4_0, DType::kQ4_Z,
                           DType::kMXFP4, DType::kIQ4_NL, DType::kNVFP4}) {
    for (uint32_t seed = 0; seed < 4; ++seed) {
      std::vector<float> x = gaussian(40 * 192, seed);
      for (size_t i = 7; i < x.size(); i += 101) x[i] *= 8.0f;  // outliers, as real weights have
      std::vector<std::byte> coded(bytes_of(type, static_cast<int64_t>(x.size())));
      quantize(type, x.data(), coded.data(), static_cast<int64_t>(x.size()));
      std::vector<float> plain(x.size());
      dequantize(type, coded.data(), plain.data(), static_cast<int64_t>(x.size()));
      EXPECT_LE(relative_rms(x, there_and_back(type, x, 192)), relative_rms(x, plain) * 1.0001)
          << info(type).name;
    }
  }
}

TEST(Encoder, KeepsWhatTheFormatHoldsExactly) {
  // Encoding decoded blocks again gives the same values: a file quantized twice to a type loses nothing more.
  for (const DType type : {DType::kF16, DType::kBF16, DType::kQ8_0, DType::kQ4_0, DType::kQ4_Z, DType::kMXFP4,
                           DType::kIQ4_NL, DType::kNVFP4}) {
    const std::vector<float> once = there_and_back(type, gaussian(32 * 256, 3), 256);
    const double again = relative_rms(once, there_and_back(type, once, 256));
    EXPECT_LT(again, 1e-3) << info(type).name;  // a scale may move by a bit of its f16
  }
  const std::vector<float> zeros(512, 0.0f);
  for (const DType type : encodable_types()) {
    EXPECT_EQ(there_and_back(type, zeros, 256), zeros) << info(type).name;
  }
}

// What Q4_Z is for: 16 even levels of any step and place in a half bit less than Q4_1 takes. Codes survive
// the change, and what is left is the rounding of scale (1/16) and zero point (1/8 of a step).
TEST(Encoder, KeepsTheCodesOfQ4_1InQ4_Z) {
  const std::vector<float> once = there_and_back(DType::kQ4_1, gaussian(64 * 576, 4), 576);
  EXPECT_LT(relative_rms(once, there_and_back(DType::kQ4_Z, once, 576)), 0.022);
  EXPECT_GT(relative_rms(once, there_and_back(DType::kQ4_0, once, 576)), 0.06);
}

TEST(Encoder, WeighsColumnsByTheirImportance) {
  const std::vector<float> x = gaussian(128 * 256, 5);
  std::vector<float> importance(256);
  for (size_t c = 0; c < importance.size(); ++c) importance[c] = c % 8 == 0 ? 50.0f : 1.0f;
  for (const DType type : {DType::kQ6_K, DType::kQ4_K, DType::kQ4_1, DType::kQ4_0, DType::kQ4_Z,
                           DType::kMXFP4, DType::kIQ4_NL, DType::kIQ4_XS, DType::kQ3_K, DType::kQ2_K}) {
    const double plain = relative_rms(x, there_and_back(type, x, 256), importance.data(), 256);
    const double weighed =
        relative_rms(x, there_and_back(type, x, 256, importance.data()), importance.data(), 256);
    // MXFP4 has only its exponent to choose.
    EXPECT_LT(weighed, plain * (type == DType::kMXFP4 ? 0.99 : 0.97)) << info(type).name;
  }
}

TEST(Encoder, DoesNotDependOnHowRowsAreGrouped) {
  const std::vector<float> x = gaussian(7 * 768, 9);
  std::vector<float> importance = gaussian(768, 10);
  for (float& w : importance) w *= w;
  for (const DType type : encodable_types()) {
    const size_t row = bytes_of(type, 768);
    std::vector<std::byte> whole(7 * row), single(7 * row);
    encode_rows(type, x.data(), 7, 768, importance.data(), whole.data());
    for (size_t r = 0; r < 7; ++r) {
      encode_rows(type, x.data() + r * 768, 1, 768, importance.data(), single.data() + r * row);
    }
    EXPECT_EQ(whole, single) << info(type).name;
  }
}

TEST(Encoder, HoldsHugeTinyAndLopsidedValues) {
  for (const DType type : encodable_types()) {
    for (const float scale : {1e-30f, 1e-7f, 1e4f, 1e30f}) {
      std::vector<float> x = gaussian(512, 11, scale);
      for (size_t i = 0; i < 256; ++i) x[i] = std::fabs(x[i]);  // a minimum above zero
      const std::vector<float> back = there_and_back(type, x, 256);
      EXPECT_TRUE(all_finite(back.data(), 512)) << info(type).name << " at " << scale;
    }
  }
  for (const DType type : {DType::kQ4_K, DType::kQ5_K, DType::kQ4_1, DType::kQ6_K}) {
    std::vector<float> x = gaussian(512, 12, 0.01f);
    for (float& v : x) v += 1.0f;  // far from zero
    EXPECT_LT(relative_rms(x, there_and_back(type, x, 256)), 0.04) << info(type).name;
  }
}

TEST(Encoder, SaysWhatIsNotFiniteAndWhatItCannotWrite) {
  std::vector<float> x(100, 1.0f);
  EXPECT_TRUE(all_finite(x.data(), 100));
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    x[63] = bad;
    EXPECT_FALSE(all_finite(x.data(), 100));
  }
  std::byte out[16];
  EXPECT_THROW(encode_rows(DType::kI32, x.data(), 1, 1, nullptr, out), Error);
  EXPECT_FALSE(can_encode(DType::kF8E4M3));
}

}  // namespace
}  // namespace millrace::quant
