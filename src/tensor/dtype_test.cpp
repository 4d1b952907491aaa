// Block sizes against the layouts' own arithmetic, names both ways, and the shape arithmetic of TensorView.
#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tensor/tensor_view.h"

namespace millrace {
namespace {

constexpr int kNumTypes = static_cast<int>(DType::kU8) + 1;

struct Layout {
  DType type;
  int elements;
  int bytes;
};

// Bytes written as the sum of what a block holds.
constexpr Layout kLayouts[] = {
    {DType::kF32, 1, 4},
    {DType::kF16, 1, 2},
    {DType::kBF16, 1, 2},
    {DType::kF8E4M3, 1, 1},
    {DType::kQ8_0, 32, 2 + 32},                  // scale, bytes
    {DType::kQ4_0, 32, 2 + 16},                  // scale, nibbles
    {DType::kQ4_1, 32, 2 + 2 + 16},              // scale, minimum, nibbles
    {DType::kQ5_0, 32, 2 + 4 + 16},              // scale, fifth bits, nibbles
    {DType::kQ5_1, 32, 2 + 2 + 4 + 16},          // scale, minimum, fifth bits, nibbles
    {DType::kQ4_K, 256, 2 + 2 + 12 + 128},       // two scales, 8 pairs of 6 bits, nibbles
    {DType::kQ5_K, 256, 2 + 2 + 12 + 32 + 128},  // the same and fifth bits
    {DType::kQ6_K, 256, 128 + 64 + 16 + 2},      // low nibbles, high pairs, 16 scales, scale
    {DType::kQ4_Z, 32, 2 + 16},                  // scale and zero point, nibbles
    {DType::kMXFP4, 32, 1 + 16},                 // e8m0, nibbles
    {DType::kMXFP4Split, 32, 16},                // nibbles
    {DType::kQ2_K, 256, 16 + 64 + 2 + 2},        // 16 pairs of nibbles, codes of 2 bits, two scales
    {DType::kQ3_K, 256, 32 + 64 + 12 + 2},       // third bits, two bits, 16 scales of 6 bits, scale
    {DType::kIQ4_NL, 32, 2 + 16},                // scale, nibbles
    {DType::kIQ4_XS, 256, 2 + 2 + 4 + 128},      // scale, 8 scales of 2 + 4 bits, nibbles
    {DType::kIQ3_XXS, 256, 2 + 64 + 32},         // scale, bytes of 4 elements, 8 words of signs and scale
    {DType::kIQ3_S, 256, 2 + 64 + 8 + 32 + 4},   // scale, 8 + 1 bits of 4 elements, signs, 8 scales
    {DType::kIQ2_XXS, 256, 2 + 64},              // scale, 8 times 4 bytes of 8 elements and signs, scale
    {DType::kIQ2_XS, 256, 2 + 64 + 8},           // scale, 9 bits of 8 elements and 7 of signs, 16 scales
    {DType::kIQ2_S, 256, 2 + 32 + 32 + 8 + 8},   // scale, 8 bits of 8 elements, signs, 2 bits, 16 scales
    {DType::kIQ1_S, 256, 2 + 32 + 16},           // scale, 8 bits of 8 elements, 3 bits and scales
    {DType::kIQ1_M, 256, 32 + 16 + 8},           // 8 bits of 8 elements, 3 bits and shifts, scales
    {DType::kTQ1_0, 256, 48 + 4 + 2},            // five digits to a byte, the last 16 elements, scale
    {DType::kTQ2_0, 256, 64 + 2},                // codes of 2 bits, scale
    {DType::kNVFP4, 64, 4 + 32},                 // four scales, nibbles
    {DType::kI32, 1, 4},
    {DType::kU8, 1, 1},
};

TEST(DType, BlockSizes) {
  ASSERT_EQ(std::size(kLayouts), static_cast<size_t>(kNumTypes));
  for (const Layout& layout : kLayouts) {
    const DTypeInfo& found = info(layout.type);
    EXPECT_EQ(found.block_elements, layout.elements) << found.name;
    EXPECT_EQ(found.block_bytes, layout.bytes) << found.name;
    EXPECT_EQ(bytes_of(layout.type, 3 * layout.elements), static_cast<size_t>(3 * layout.bytes))
        << found.name;
  }
}

TEST(DType, NamesGoBothWays) {
  for (int i = 0; i < kNumTypes; ++i) {
    const auto type = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(info(type).name), type) << info(type).name;
  }
  EXPECT_EQ(info(DType::kQ4_K).name, "q4_k");
  EXPECT_EQ(parse_dtype("Q4_K"), std::nullopt);
  EXPECT_EQ(parse_dtype(""), std::nullopt);
}

TEST(DType, SizesBeyond32Bits) { EXPECT_EQ(bytes_of(DType::kF32, int64_t{1} << 40), size_t{1} << 42); }

TEST(TensorView, ShapeArithmetic) {
  std::array<std::byte, 1> data{};
  TensorView experts;
  experts.type = DType::kMXFP4;
  experts.rank = 3;
  experts.shape = {4, 6, 64, 1};
  experts.data = data.data();
  experts.row_stride_bytes = 34;
  EXPECT_EQ(experts.cols(), 64);
  EXPECT_EQ(experts.rows(), 24);
  EXPECT_EQ(experts.elements(), 4 * 6 * 64);
  EXPECT_EQ(experts.bytes(), 24u * 34u);
  EXPECT_EQ(experts.row(0), data.data());
}

TEST(TensorView, ScalarsAndEmptyOnes) {
  TensorView scalar;
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_EQ(scalar.rows(), 1);
  EXPECT_EQ(scalar.bytes(), 4u);
  TensorView empty;
  empty.rank = 2;
  empty.shape = {3, 0, 1, 1};
  EXPECT_EQ(empty.elements(), 0);
  EXPECT_EQ(empty.rows(), 0);
  EXPECT_EQ(empty.bytes(), 0u);
}

}  // namespace
}  // namespace millrace
