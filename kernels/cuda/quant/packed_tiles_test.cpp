#include "kernels/cuda/quant/packed_tiles.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <set>

namespace millrace::cuda {
namespace {

TEST(PackedMxfp4, EveryWordDecodesToItsCodes) {
  std::mt19937 random(1);
  for (int n = 0; n < 200000; ++n) {
    const uint32_t codes = n < 65536 ? static_cast<uint32_t>(n) * 0x10001u : static_cast<uint32_t>(random());
    const uint32_t word = encode_mxfp4(codes);
    for (int i = 0; i < 8; ++i)
      ASSERT_EQ(decode_mxfp4(word, i), codes >> (4 * i) & 15u) << std::hex << codes << " " << i;
  }
}

TEST(PackedMxfp4, PairsAreBf16sInDisguise) {
  std::mt19937 random(2);
  for (int n = 0; n < 200000; ++n) {
    const auto codes = static_cast<uint32_t>(random());
    const uint32_t word = encode_mxfp4(codes);
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = codes >> (4 * i) & 15u,
                     half = mxfp4_pair(word, i / 2) >> (16 * (i % 2)) & 0xffffu;
      ASSERT_EQ(half, (code & 8u) << 12 | (code & 7u) << 6) << std::hex << codes << " " << i;
    }
  }
}

TEST(PackedMxfp4, ScalesUpTo2To33AreKept) {
  for (int e = 0; e <= 160; ++e) {
    EXPECT_EQ(decode_mxfp4_scale(encode_mxfp4_scale(static_cast<uint8_t>(e))), e);
  }
  EXPECT_EQ(encode_mxfp4_scale(161), 255);  // infinite: shows in whatever is computed with it
  EXPECT_EQ(encode_mxfp4_scale(255), 255);
}

// The fragment of step s of lane t is words 2s and 2s + 1 of its eight elements: k 2t, 2t + 1, then 2t + 8,
// 2t + 9.
TEST(PackedMxfp4, ActivationsLieAsTheirWeights) {
  for (uint32_t odd = 0; odd < 2; ++odd) {
    for (uint32_t t = 0; t < 4; ++t) {
      for (uint32_t word = 0; word < 4; ++word) {
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t step = 2 * odd + word / 2, k = 2 * t + 8 * (word % 2) + i;
          EXPECT_EQ(mxfp4_position(32 * odd + 8 * t + 2 * word + i), 16 * step + k);
        }
      }
    }
  }
}

float bf16_value(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
uint32_t bf16_bits(double value) {  // nearest, ties to even; normal numbers
  const auto bits = std::bit_cast<uint64_t>(value);
  const uint64_t rounded = (bits + (uint64_t{1} << 44) - 1 + (bits >> 45 & 1)) >> 45 << 45;
  return std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(rounded))) >> 16;
}

// Each step that a lane takes: eight bits are a bf16, the offset is exact, and one fused multiply-add gives
// (u - 128) times the scale, rounded once.
TEST(PackedQ8, OneRoundingMakesTheWeight) {
  std::mt19937 random(2);
  for (int n = 0; n < 4000; ++n) {
    const float scale = std::ldexp(1.0f + static_cast<float>(random() % 1024) / 1024.0f,
                                   static_cast<int>(random() % 40) - 24) *
                        (random() % 2 == 0 ? 1.0f : -1.0f);  // what an f16 holds
    const uint16_t stored = encode_q8_scale(scale);
    const double kept = decode_q8_scale(stored), lane_scale = bf16_value(stored);
    ASSERT_LE(std::fabs(kept - scale), 0x1p-8 * std::fabs(scale));
    ASSERT_EQ(lane_scale, kept * 0x1p101);
    const double offset = -0x1p-126 * lane_scale;
    ASSERT_EQ(bf16_value(bf16_bits(offset)), offset);
    for (uint32_t u = 0; u < 256; ++u) {
      ASSERT_EQ(bf16_value(u), u * 0x1p-133);
      const double fused = bf16_value(u) * lane_scale + offset;  // exact: 16 bits, and what cancels
      const double weight = (static_cast<int>(u) - 128) * kept * 0x1p-32;
      ASSERT_EQ(fused, weight);
      if (u == 128) continue;
      ASSERT_GE(std::fabs(bf16_value(bf16_bits(fused))), 0x1p-126);
      ASSERT_LE(std::fabs(bf16_value(bf16_bits(fused)) - weight), 0x1p-8 * std::fabs(weight));
    }
  }
}

TEST(PackedQ8, WhatIsNotFiniteStaysSo) {
  EXPECT_TRUE(std::isinf(bf16_value(encode_q8_scale(INFINITY))));
  EXPECT_TRUE(std::isnan(bf16_value(encode_q8_scale(NAN))));
  EXPECT_TRUE(std::isfinite(bf16_value(encode_q8_scale(65504.0f))));
  EXPECT_EQ(encode_q8_scale(0.0f), 0);
}

// Codes come back, no two share a bit, and each is a bf16 in disguise: u * 2^-133, or, of odd pairs, so many
// bits higher.
template <int kBits>
void check_affine_words() {
  std::mt19937 random(3);
  for (int n = 0; n < 20000; ++n) {
    uint32_t words[2] = {}, rest = 0, codes[16];
    for (int i = 0; i < 16; ++i) {
      codes[i] = n == 0 ? (1u << kBits) - 1 : static_cast<uint32_t>(random() & ((1u << kBits) - 1));
      affine_put<kBits>(codes[i], i / 8, i % 8, words[i / 8], rest);
    }
    if (kBits == 5) {
      ASSERT_EQ(widen_fifth_bits(narrow_fifth_bits(rest)), rest);
    }
    if (n == 0) {
      ASSERT_EQ(std::popcount(words[0]) + std::popcount(words[1]) + std::popcount(rest), 16 * kBits);
    }
    for (int i = 0; i < 16; ++i) {
      const int odd = i / 8, p = i % 8 / 2;
      ASSERT_EQ(affine_code<kBits>(words[odd], rest, odd, i % 8), codes[i])
          << kBits << " bits, element " << i;
      const uint32_t half = affine_pair<kBits>(words[odd], rest, odd, p) >> (16 * (i % 2)) & 0xffffu;
      ASSERT_EQ(bf16_value(half), static_cast<float>(codes[i]) * 0x1p-133f *
                                      (p % 2 == 0 ? 1.0f : static_cast<float>(1 << (8 - kBits))));
    }
  }
}
TEST(PackedAffine, CodesComeBack) {
  check_affine_words<4>();
  check_affine_words<5>();
  check_affine_words<6>();
}

// The minimum is a bf16, as the scale; a whole number of scales up to 32 is exact.
TEST(PackedAffine, MinimaAreRoundedOnce) {
  std::mt19937 random(4);
  for (int n = 0; n < 4000; ++n) {
    const float value = std::ldexp(1.0f + static_cast<float>(random() % 65536) / 65536.0f,
                                   static_cast<int>(random() % 44) - 24) *
                        (random() % 2 == 0 ? 1.0f : -1.0f);
    const float kept = decode_affine_min(encode_affine_min(value));
    ASSERT_LE(std::fabs(kept - value), 0x1p-8f * std::fabs(value));
    ASSERT_EQ(bf16_value(encode_affine_min(value)) * kPackedUnscale, -kept);
    const float scale = decode_q8_scale(encode_q8_scale(value));
    for (const float zero : {8.0f, 16.0f, 32.0f}) {
      ASSERT_EQ(decode_affine_min(encode_affine_min(zero * scale)), zero * scale);
    }
  }
  EXPECT_EQ(decode_affine_min(encode_affine_min(0.0f)), 0.0f);
  EXPECT_TRUE(std::isnan(bf16_value(encode_affine_min(NAN))));
}

// Every element of a pair has a place of its own, for every format, and 16 columns are a step together.
TEST(PackedMatrix, ColumnsKeepTheirStep) {
  for (const PackedFormat format : {PackedFormat::kQ8, PackedFormat::kMxfp4, PackedFormat::kBf16,
                                    PackedFormat::kQ4, PackedFormat::kQ5, PackedFormat::kQ6}) {
    std::set<uint32_t> places;
    for (uint32_t i = 0; i < 64; ++i) {
      places.insert(column_position(format, i));
      if (i % 2 == 0) {
        EXPECT_EQ(column_position(format, i + 1), column_position(format, i) + 1);
      }
    }
    EXPECT_EQ(places.size(), 64u);
    EXPECT_EQ(*places.rbegin(), 63u);
  }
  std::set<uint32_t> chunks;
  for (uint32_t row = 0; row < 8; ++row) {
    for (uint32_t chunk = 0; chunk < 8; ++chunk) chunks.insert(bf16_chunk(row, chunk));
  }
  EXPECT_EQ(chunks.size(), 64u);
  EXPECT_EQ(*chunks.rbegin(), 1024u - 16);
}

TEST(PackedMatrix, ShapesAreWholeTilesAndPairs) {
  const PackedMatrix q8 = packed_shape(DType::kQ8_0, 5120, 2880), mxfp4 = packed_shape(DType::kMXFP4, 37, 96);
  EXPECT_EQ(q8.tiles_per_expert, 640);
  EXPECT_EQ(q8.tile_bytes, 8u * (2880 + 90 * 2));
  EXPECT_EQ(mxfp4.tiles_per_expert, 5);
  EXPECT_EQ(mxfp4.k_steps, 2);  // three blocks
  EXPECT_EQ(mxfp4.tile_bytes, 2u * 272);
  for (const DType type : {DType::kBF16, DType::kF16, DType::kF8E4M3})
    EXPECT_EQ(packed_format(type, 256), PackedFormat::kBf16);
  for (const DType type : {DType::kQ4_K, DType::kQ4_0, DType::kQ4_1, DType::kQ4_Z})
    EXPECT_EQ(packed_format(type, 256), PackedFormat::kQ4);
  for (const DType type : {DType::kQ5_K, DType::kQ5_0, DType::kQ5_1})
    EXPECT_EQ(packed_format(type, 256), PackedFormat::kQ5);
  EXPECT_EQ(packed_format(DType::kQ6_K, 256), PackedFormat::kQ6);
  EXPECT_EQ(packed_shape(DType::kQ4_K, 9, 4096).tile_bytes, 64u * 320);  // 5 bits a weight
  EXPECT_EQ(packed_shape(DType::kBF16, 9, 96).tile_bytes, 2u * 1024);
  EXPECT_EQ(packed_format(DType::kBF16, 100), PackedFormat::kNone);
  EXPECT_EQ(packed_format(DType::kF32, 256), PackedFormat::kNone);
}

}  // namespace
}  // namespace millrace::cuda
