#include "kernels/quant/fp8_patches.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/float_bits.h"

namespace millrace::quant {
namespace {

float decoded(const Fp8Patches& p, int64_t r, int64_t c) {
  return to_float(Fp8E4M3{p.codes[static_cast<size_t>(r * p.cols + c)]}) *
         p.scales[static_cast<size_t>(r / kFp8Patch * p.patch_cols() + c / kFp8Patch)];
}

Fp8Patches patches_of(const TensorView& view) {
  Fp8Patches to = shaped_fp8_patches(view);
  for (int64_t p = 0; p < to.patch_rows(); ++p) fill_fp8_patches(view, p, to);
  return to;
}

TensorView view_of(DType type, int64_t rows, int64_t cols, const void* data, int64_t element) {
  TensorView view;
  view.name = "a matrix";
  view.type = type;
  view.rank = 2;
  view.shape = {rows, cols, 1, 1};
  view.data = static_cast<const std::byte*>(data);
  view.row_stride_bytes = cols * element;
  return view;
}

TEST(Fp8Patches, AreWithinAStepOfEachPatchsLargest) {
  constexpr int64_t kRows = 132, kCols = 160;  // two patches down and across, of which one is cut
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<BFloat16> values(kRows * kCols);
  for (BFloat16& x : values) x = to_bfloat16(normal(random));
  for (int64_t r = 0; r < kFp8Patch; ++r) {  // one patch of zeros
    for (int64_t c = kFp8Patch; c < kCols; ++c) values[static_cast<size_t>(r * kCols + c)] = {0};
  }
  const Fp8Patches p = patches_of(view_of(DType::kBF16, kRows, kCols, values.data(), 2));
  EXPECT_EQ(p.patch_rows(), 2);
  EXPECT_EQ(p.patch_cols(), 2);
  EXPECT_EQ(p.scales[1], 0.0f);
  float largest = 0.0f;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; ++c) {
      const float x = to_float(values[static_cast<size_t>(r * kCols + c)]), y = decoded(p, r, c);
      const float scale = p.scales[static_cast<size_t>(r / kFp8Patch * 2 + c / kFp8Patch)];
      // Half a step of three bits, or half of the smallest one.
      EXPECT_LE(std::fabs(x - y), std::max(std::fabs(x) / 16.0f, scale * 0x1p-10f) * 1.001f) << r << " " << c;
      if (r < kFp8Patch && c < kFp8Patch) largest = std::max(largest, std::fabs(x));
    }
  }
  EXPECT_FLOAT_EQ(p.scales[0], largest / 448.0f);
}

TEST(Fp8Patches, OfACheckpointOfSuchPatchesAreItsOwn) {
  constexpr int64_t kRows = 256, kCols = 128;
  std::vector<uint8_t> codes(kRows * kCols);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7 % 127);
  const BFloat16 scales[2] = {to_bfloat16(0.25f), to_bfloat16(3.0f)};
  TensorView view = view_of(DType::kF8E4M3, kRows, kCols, codes.data(), 1);
  view.scales = {reinterpret_cast<const std::byte*>(scales), DType::kBF16, 128, 128, 1, 0};
  Fp8Patches p = patches_of(view);
  EXPECT_EQ(p.codes, codes);
  EXPECT_EQ(p.scales, (std::vector<float>{0.25f, 3.0f}));
  // One scale to 64 rows is none to a patch: rounded anew.
  const BFloat16 four[4] = {scales[0], scales[1], scales[1], scales[0]};
  view.scales = {reinterpret_cast<const std::byte*>(four), DType::kBF16, 64, 128, 1, 0};
  p = patches_of(view);
  EXPECT_NE(p.codes, codes);
  EXPECT_NEAR(decoded(p, 0, 10), to_float(Fp8E4M3{codes[10]}) * 0.25f, 0.25f * 448.0f / 16.0f);
}

TEST(Fp8Patches, RowsKeepWhatIsNoNumber) {
  std::vector<float> x(160, 1.0f);
  x[3] = std::nanf("");
  x[140] = INFINITY;
  std::vector<uint8_t> codes(160);
  float scales[2];
  fp8_row(x.data(), 160, codes.data(), scales);
  EXPECT_TRUE(std::isnan(to_float(Fp8E4M3{codes[3]})));
  EXPECT_FALSE(std::isfinite(to_float(Fp8E4M3{codes[140]}) * scales[1]));
  EXPECT_EQ(to_float(Fp8E4M3{codes[0]}), 448.0f);
}

TEST(Fp8Patches, AreOfMatricesThatTensorCoresTake) {
  EXPECT_TRUE(fits_fp8_patches(view_of(DType::kBF16, 8, 96, nullptr, 2)));
  EXPECT_FALSE(fits_fp8_patches(view_of(DType::kF32, 8, 96, nullptr, 4)));
  EXPECT_FALSE(fits_fp8_patches(view_of(DType::kBF16, 9, 96, nullptr, 2)));
  EXPECT_FALSE(fits_fp8_patches(view_of(DType::kBF16, 8, 80, nullptr, 2)));
}

}  // namespace
}  // namespace millrace::quant
