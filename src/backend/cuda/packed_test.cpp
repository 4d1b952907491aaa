#include "backend/cuda/ops/packed.h"

#include <gtest/gtest.h>

#include <random>

namespace millrace::cuda {
namespace {

TEST(PackedMx4, EveryWordDecodesToItsCodes) {
  std::mt19937 random(1);
  for (int n = 0; n < 200000; ++n) {
    const uint32_t codes = n < 65536 ? static_cast<uint32_t>(n) * 0x10001u : static_cast<uint32_t>(random());
    const uint32_t word = encode_mx4(codes);
    for (int i = 0; i < 8; ++i)
      ASSERT_EQ(decode_mx4(word, i), codes >> (4 * i) & 15u) << std::hex << codes << " " << i;
  }
}

TEST(PackedMx4, PairsAreBf16sInDisguise) {
  std::mt19937 random(2);
  for (int n = 0; n < 200000; ++n) {
    const auto codes = static_cast<uint32_t>(random());
    const uint32_t word = encode_mx4(codes);
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = codes >> (4 * i) & 15u, half = mx4_pair(word, i / 2) >> (16 * (i % 2)) & 0xffffu;
      ASSERT_EQ(half, (code & 8u) << 12 | (code & 7u) << 6) << std::hex << codes << " " << i;
    }
  }
}

TEST(PackedMx4, ScalesUpTo2To33AreKept) {
  for (int e = 0; e <= 160; ++e) {
    EXPECT_EQ(decode_mx4_scale(encode_mx4_scale(static_cast<uint8_t>(e))), e);
  }
  EXPECT_EQ(encode_mx4_scale(161), 255);  // infinite: shows in whatever is computed with it
  EXPECT_EQ(encode_mx4_scale(255), 255);
}

// The fragment of step s of lane t is words 2s and 2s + 1 of its eight elements: k 2t, 2t + 1, then 2t + 8,
// 2t + 9.
TEST(PackedMx4, ActivationsMeetTheirWeights) {
  for (uint32_t odd = 0; odd < 2; ++odd) {
    for (uint32_t t = 0; t < 4; ++t) {
      for (uint32_t word = 0; word < 4; ++word) {
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t step = 2 * odd + word / 2, k = 2 * t + 8 * (word % 2) + i;
          EXPECT_EQ(mx4_position(32 * odd + 8 * t + 2 * word + i), 16 * step + k);
        }
      }
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
