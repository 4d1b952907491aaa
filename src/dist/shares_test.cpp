// Every row, head and KV head has a rank that computes it, whatever the shape and the speeds.
#include "dist/shares.h"

#include "dist/rank_speeds.h"

#include <gtest/gtest.h>

#include <random>

#include "millrace/error.h"

namespace millrace::dist {
namespace {

TEST(Shares, CutsCoverEveryRowOnce) {
  std::mt19937 random(28);
  for (int i = 0; i < 2000; ++i) {
    const int ranks = 1 + static_cast<int>(random() % kMaxTensorRanks);
    std::vector<double> speeds;
    for (int r = 0; r < ranks; ++r)
      speeds.push_back(i % 2 == 0 ? 1.0 : 0.1 + static_cast<double>(random() % 100));
    const Shares shares(0, speeds);
    const auto total = static_cast<int64_t>(random() % 5000);
    const std::vector<int64_t> bounds = shares.cut(total);
    ASSERT_EQ(bounds.size(), speeds.size() + 1);
    EXPECT_EQ(bounds.front(), 0);
    EXPECT_EQ(bounds.back(), total);
    for (size_t r = 0; r + 1 < bounds.size(); ++r) {
      EXPECT_LE(bounds[r], bounds[r + 1]);
      const bool everybody = i % 2 == 0 && total >= ranks;
      EXPECT_TRUE(!everybody || bounds[r] < bounds[r + 1]) << total << " over " << ranks;
      const bool whole_units = total >= 32 * ranks && bounds[r + 1] != total;
      EXPECT_TRUE(!whole_units || bounds[r + 1] % 32 == 0);
    }
  }
}

TEST(Shares, EveryHeadHasOneRankAndItsKvHeadWithIt) {
  for (int64_t kv_heads = 1; kv_heads <= 9; ++kv_heads) {
    for (int64_t group = 1; group <= 9; ++group) {
      for (int ranks = 1; ranks <= kMaxTensorRanks; ++ranks) {
        const Shares shares = Shares::even(0, ranks);
        int64_t next = 0;
        for (int r = 0; r < ranks; ++r) {
          const auto [query, kv] = shares.heads_of(r, kv_heads * group, kv_heads);
          EXPECT_EQ(query.begin, next);
          next = query.end;
          if (query.size() == 0) {
            EXPECT_EQ(kv.size(), 0);
            continue;
          }
          EXPECT_EQ(kv.begin, query.begin / group);
          EXPECT_EQ(kv.end, (query.end + group - 1) / group);
          EXPECT_EQ(query.size() % kv.size(), 0);  // attention has as many query heads for every KV head
        }
        EXPECT_EQ(next, kv_heads * group);
      }
    }
  }
}

TEST(Shares, FollowTheSpeeds) {
  const Shares shares(1, {3.0, 1.0});
  EXPECT_EQ(shares.rows(4096), (Range{3072, 4096}));
  EXPECT_EQ(shares.heads(32, 8).kv, (Range{6, 8}));
  EXPECT_THROW(Shares(0, {1.0, 0.0}), Error);
  EXPECT_THROW(Shares(0, {}), Error);
  EXPECT_THROW(Shares(0, std::vector<double>(17, 1.0)), Error);
}

TEST(Shares, StagesHaveWholeLayers) {
  const Shares last = Shares::pipeline(2, {1.0, 2.0, 1.0});
  EXPECT_EQ(last.layers(24), (Range{18, 24}));
  EXPECT_EQ(last.layers_of(1, 24), (Range{6, 18}));
  EXPECT_EQ(last.rows(4096), (Range{0, 4096}));
  EXPECT_EQ(last.heads(32, 8).query, (Range{0, 32}));
  EXPECT_EQ(Shares::even(1, 2).layers(24), (Range{0, 24}));
  EXPECT_EQ(last.layers_of(0, 3), (Range{0, 1}));
  EXPECT_EQ(last.layers_of(1, 3), (Range{1, 2}));
  EXPECT_EQ(last.layers_of(2, 3), (Range{2, 3}));
}

// Three of a model: stages have their ranks' speeds together, and each rank its part of its stage.
TEST(Shares, StagesOfRanks) {
  const std::vector<double> speeds = {2, 1, 1, 2, 1, 1};
  for (int r = 0; r < 6; ++r) {
    const Shares shares = Shares::grid(r, 2, speeds);
    EXPECT_EQ(shares.stages(), 3);
    EXPECT_EQ(shares.ranks(), 2);
    EXPECT_EQ(shares.stage(), r / 2);
    EXPECT_EQ(shares.rank(), r % 2);
    EXPECT_EQ(shares.layers(16), Shares::pipeline(r / 2, {3, 3, 2}).layers(16));
    EXPECT_EQ(shares.rows(960), Shares(r % 2, {speeds[r / 2 * 2], speeds[r / 2 * 2 + 1]}).rows(960));
    EXPECT_EQ(shares.within_stage().stages(), 1);
    EXPECT_EQ(shares.within_stage().rows(960), shares.rows(960));
    EXPECT_EQ(shares.between_stages().ranks(), 1);
    EXPECT_EQ(shares.between_stages().layers(16), shares.layers(16));
  }
}

TEST(RankSpeeds, MeasuredOnesAreEighths) {
  const std::vector<double> alike = {41.2, 40.1, 39.5}, mixed = {80, 41, 3};
  EXPECT_EQ(speeds_in_eighths(alike), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(speeds_in_eighths(mixed), (std::vector<double>{1, 0.5, 0.125}));
}

TEST(RankSpeeds, NobodyGetsMoreThanItHolds) {
  const std::vector<size_t> enough = {1000, 1000, 1000}, little = {1000, 100, 1000}, none = {10, 10, 10};
  EXPECT_EQ(speeds_within({1, 1, 2}, enough, 1200), (std::vector<double>{1, 1, 2}));
  EXPECT_EQ(speeds_within({1, 1, 1}, little, 1200), (std::vector<double>{0.458, 0.083, 0.458}));
  EXPECT_EQ(speeds_within({1, 1, 2}, little, 1900), (std::vector<double>{0.421, 0.053, 0.526}));
  EXPECT_THROW(speeds_within({1, 1, 1}, none, 1200), Error);
}

}  // namespace
}  // namespace millrace::dist
