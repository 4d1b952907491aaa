// What launchers make of a tuning table. No GPU.
#include "backend/cuda/read_tuning.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "kernels/cuda/gemm/gemm.h"

namespace millrace::cuda {
namespace {

TuningEntry entry(std::string kernel, std::string format, int64_t outputs, int64_t cols, int64_t rows,
                  std::string choice) {
  return {"x", {std::move(kernel), std::move(format), outputs, cols, rows}, std::move(choice), {}};
}

TEST(CudaTuning, NamesAreDifferent) {
  std::set<std::string_view> names;
  for (const GemmCandidate& c : gemm_candidates()) EXPECT_TRUE(names.insert(c.name).second) << c.name;
  names.clear();
  for (const RingCandidate& c : ring_candidates()) EXPECT_TRUE(names.insert(c.name).second) << c.name;
  // The first is what runs without a table.
  EXPECT_EQ(gemm_candidates()[0].tile, GemmTile::kDefault);
  EXPECT_EQ(ring_candidates()[0].bytes, 0u);
}

TEST(CudaTuning, AnEntryHoldsFromTheOneBeforeItOn) {
  TuningTable table;
  table.entries = {
      entry("gemm", "bf16", 5120, 2880, 2048, "cluster"), entry("gemm", "bf16", 5120, 2880, 128, "64x128"),
      entry("gemm", "q8", 5120, 2880, 128, "64x64"), entry("gemv", "q8", 201088, 2880, 1, "200 KB"),
      entry("gemv", "q8", 201088, 2880, 4, "231 KB")};
  const Tuning tuning = read_tuning(table);
  const auto tile = [&](int64_t rows) { return tuning.tile(PackedFormat::kBf16, 5120, 2880, rows); };
  EXPECT_EQ(tile(5), GemmTile::k64x128);
  EXPECT_EQ(tile(128), GemmTile::k64x128);
  EXPECT_EQ(tile(129), GemmTile::kCluster);
  EXPECT_EQ(tile(2048), GemmTile::kCluster);
  EXPECT_EQ(tile(100000), GemmTile::kCluster);
  EXPECT_EQ(tuning.tile(PackedFormat::kQ8, 5120, 2880, 2048), GemmTile::k64x64);
  EXPECT_EQ(tuning.tile(PackedFormat::kMxfp4, 5120, 2880, 128), GemmTile::kDefault);
  EXPECT_EQ(tuning.tile(PackedFormat::kBf16, 5112, 2880, 128), GemmTile::kDefault);
  EXPECT_EQ(tuning.tile(PackedFormat::kBf16, 5120, 4096, 128), GemmTile::kDefault);
  EXPECT_EQ(tuning.ring_bytes(PackedFormat::kQ8, 201088, 2880, 1), 200000u);
  EXPECT_EQ(tuning.ring_bytes(PackedFormat::kQ8, 201088, 2880, 2), 231000u);
  EXPECT_EQ(tuning.ring_bytes(PackedFormat::kQ8, 5120, 2880, 1), 0u);
  EXPECT_TRUE(Tuning().empty());
  EXPECT_EQ(Tuning().tile(PackedFormat::kBf16, 5120, 2880, 128), GemmTile::kDefault);
}

TEST(CudaTuning, WhatIsUnknownIsNamed) {
  const TuningEntry bad[] = {
      entry("wide", "bf16", 1, 64, 1, "default"), entry("gemm", "bf15", 1, 64, 1, "default"),
      entry("gemm", "bf16", 1, 64, 1, "129x256"), entry("gemv", "q8", 1, 64, 1, "128x128"),
      entry("gemm", "mxfp4", 1, 64, 1, "cluster")};  // has no such kernel
  for (const TuningEntry& e : bad) {
    TuningTable table;
    table.entries = {e};
    try {
      const Tuning tuning = read_tuning(table);
      ADD_FAILURE() << e.key.kernel << " " << e.key.format << " " << e.choice;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBadInput);
      EXPECT_NE(std::string(error.what()).find("the tuning of x"), std::string::npos) << error.what();
    }
  }
}

TEST(CudaTuning, ClusterTilesAreForWeightsThatLieAsBf16) {
  for (const GemmCandidate& c : gemm_candidates()) {
    EXPECT_TRUE(supports_tile(c.tile, PackedFormat::kBf16)) << c.name;
    EXPECT_TRUE(supports_tile(c.tile, PackedFormat::kQ8)) << c.name;
    EXPECT_EQ(supports_tile(c.tile, PackedFormat::kMxfp4), c.tile < GemmTile::kCluster) << c.name;
    Gemm op;
    op.num_parts = 2;
    op.parts[0].w.format = op.parts[1].w.format = PackedFormat::kQ8;
    const uint8_t tiles = 0;
    op.parts[0].w.dequantized = &tiles;
    EXPECT_EQ(supports_tile(c.tile, op), c.tile < GemmTile::kCluster) << c.name;
    op.parts[1].w.dequantized = &tiles;
    EXPECT_TRUE(supports_tile(c.tile, op)) << c.name;
  }
}

}  // namespace
}  // namespace millrace::cuda
