// Error feedback against its purpose: the error of W x, on inputs it was made for and on others like them.
#include "quant/feedback.h"

#include <gtest/gtest.h>

#include <random>

#include "kernels/cpu/quant/encoder.h"
#include "kernels/quant/codec.h"

namespace millrace::quant {
namespace {

constexpr int64_t kCols = 256, kRows = 24;

void serial(int64_t count, const std::function<void(int64_t, int64_t)>& body) { body(0, count); }

// Inputs that lie mostly in 20 directions, as activations do.
std::vector<float> inputs(int count, uint32_t seed) {
  std::mt19937 shape(7), random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> directions(20 * kCols), x(static_cast<size_t>(count * kCols));
  for (float& v : directions) v = normal(shape);
  for (int t = 0; t < count; ++t) {
    for (int64_t c = 0; c < kCols; ++c) x[t * kCols + c] = 0.3f * normal(random);
    for (int d = 0; d < 20; ++d) {
      const float along = normal(random);
      for (int64_t c = 0; c < kCols; ++c) x[t * kCols + c] += along * directions[d * kCols + c];
    }
  }
  return x;
}

std::vector<float> products_of(const std::vector<float>& x) {
  std::vector<float> out(kCols * kCols);
  for (size_t t = 0; t < x.size() / kCols; ++t) {
    for (int64_t i = 0; i < kCols; ++i) {
      for (int64_t j = 0; j < kCols; ++j) out[i * kCols + j] += x[t * kCols + i] * x[t * kCols + j];
    }
  }
  return out;
}

double output_error(const std::vector<float>& w, DType type, const std::vector<std::byte>& coded,
                    const std::vector<float>& x) {
  std::vector<float> back(w.size());
  dequantize(type, coded.data(), back.data(), static_cast<int64_t>(w.size()));
  double sum = 0.0;
  for (size_t t = 0; t < x.size() / kCols; ++t) {
    for (int64_t r = 0; r < kRows; ++r) {
      double off = 0.0;
      for (int64_t c = 0; c < kCols; ++c) off += (w[r * kCols + c] - back[r * kCols + c]) * x[t * kCols + c];
      sum += off * off;
    }
  }
  return sum;
}

TEST(ErrorFeedback, LowersTheErrorOfTheOutput) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::vector<float> w(kRows * kCols);
  for (float& v : w) v = normal(random);
  const std::vector<float> seen = inputs(128, 1), others = inputs(64, 2);
  for (const DType type : {DType::kQ4_0, DType::kMXFP4, DType::kQ4_1, DType::kQ4_Z, DType::kIQ4_NL,
                           DType::kIQ4_XS, DType::kQ4_K}) {
    std::vector<std::byte> plain(bytes_of(type, kRows * kCols)), fed(plain.size());
    encode_rows(type, w.data(), kRows, kCols, nullptr, plain.data());
    const ErrorFeedback feedback(products_of(seen), kCols, info(type).block_elements, 0.1, serial);
    std::vector<float> changed = w;
    feedback.encode_rows(type, changed.data(), kRows, fed.data());
    EXPECT_LT(output_error(w, type, fed, seen), 0.3 * output_error(w, type, plain, seen)) << info(type).name;
    EXPECT_LT(output_error(w, type, fed, others), 0.4 * output_error(w, type, plain, others))
        << info(type).name;
  }
}

TEST(ErrorFeedback, ChangesNothingWhenInputsAreIndependent) {
  const std::vector<float> alike(kCols, 1.0f);  // feedback searches with weights
  std::vector<float> identity(kCols * kCols), w(kRows * kCols);
  for (int64_t i = 0; i < kCols; ++i) identity[i * kCols + i] = 2.0f;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (float& v : w) v = normal(random);
  for (const DType type : {DType::kQ4_0, DType::kQ4_K, DType::kIQ4_XS}) {
    std::vector<std::byte> plain(bytes_of(type, kRows * kCols)), fed(plain.size());
    encode_rows(type, w.data(), kRows, kCols, alike.data(), plain.data());
    const ErrorFeedback feedback(identity, kCols, info(type).block_elements, 0.1, serial);
    std::vector<float> changed = w;
    feedback.encode_rows(type, changed.data(), kRows, fed.data());
    EXPECT_EQ(plain, fed) << info(type).name;
  }
}

TEST(ErrorFeedback, BearsInputsThatAreAllZero) {
  const ErrorFeedback feedback(std::vector<float>(kCols * kCols), kCols, 32, 0.1, serial);
  std::vector<float> w(kCols, 0.5f);
  std::vector<std::byte> out(bytes_of(DType::kQ4_0, kCols));
  feedback.encode_rows(DType::kQ4_0, w.data(), 1, out.data());
  std::vector<float> back(kCols);
  dequantize(DType::kQ4_0, out.data(), back.data(), kCols);
  for (const float v : back) EXPECT_NEAR(v, 0.5f, 0.01f);
}

}  // namespace
}  // namespace millrace::quant
