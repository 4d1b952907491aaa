#include "backend/cuda/ops/packed.h"

#include <gtest/gtest.h>

#include <random>

#include "quant/blocks.h"

namespace millrace::cuda {
namespace {

// Doubled values as quant/blocks.h has them; a negative zero may lose its sign.
TEST(PackedMx4, EveryWordDecodesToItsCodes) {
  std::mt19937 random(1);
  for (int n = 0; n < 200000; ++n) {
    const uint32_t codes = n < 65536 ? static_cast<uint32_t>(n) * 0x10001u : static_cast<uint32_t>(random());
    const uint32_t word = encode_e2m1(codes);
    for (int i = 0; i < 8; ++i) {
      ASSERT_EQ(decode_e2m1(word, i), quant::kE2M1Doubled[codes >> (4 * i) & 15u])
          << std::hex << codes << " " << i;
    }
  }
}

TEST(PackedMatrix, ShapesAreWholeTilesAndPairs) {
  const PackedMatrix q8 = packed_shape(DType::kQ8_0, 5120, 2880), mx4 = packed_shape(DType::kMXFP4, 37, 96);
  EXPECT_EQ(q8.tiles_per_expert, 640);
  EXPECT_EQ(q8.tile_bytes, 8u * (2880 + 90 * 2));
  EXPECT_EQ(mx4.tiles_per_expert, 5);
  EXPECT_EQ(mx4.pairs, 2);  // three blocks
  EXPECT_EQ(mx4.tile_bytes, 2u * 272);
  EXPECT_EQ(packed_shape(DType::kBF16, 8, 64).format, PackedFormat::kNone);
}

}  // namespace
}  // namespace millrace::cuda
