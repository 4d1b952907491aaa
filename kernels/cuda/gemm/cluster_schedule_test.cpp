// Every output is in one CTA's part of one work item; every segment of every item is somebody's, once; what
// is split is begun first by one cluster and ended last by the one before it; clusters' segments differ by
// one at most.
#include "kernels/cuda/gemm/cluster_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace millrace::cuda {
namespace {

std::vector<ClusterPiece> pieces_of(const ClusterSchedule& schedule, int cluster) {
  std::vector<ClusterPiece> all;
  ClusterPiece piece{};
  for (int k = 0; schedule.piece(cluster, k, piece); ++k) all.push_back(piece);
  return all;
}

void check(int items, int segments, int clusters, bool split) {
  SCOPED_TRACE(testing::Message() << items << " items of " << segments << ", " << clusters << " clusters"
                                  << (split ? ", split" : ""));
  ClusterSchedule schedule{};
  schedule.items = items;
  schedule.segments = segments;
  schedule.clusters = std::min(items, clusters);
  schedule.assign(split);
  std::map<int, int> done;  // segments of an item
  int least = items * segments, most = 0;
  std::vector<int> partial_of(static_cast<size_t>(schedule.clusters) + 1, -1);  // which item each passes on
  for (int c = schedule.clusters - 1; c >= 0; --c) {  // who passes on before who goes on
    const std::vector<ClusterPiece> pieces = pieces_of(schedule, c);
    ASSERT_FALSE(pieces.empty());
    int length = 0;
    for (size_t k = 0; k < pieces.size(); ++k) {
      const ClusterPiece& piece = pieces[k];
      ASSERT_LT(piece.begin, piece.end);
      length += piece.end - piece.begin;
      if (piece.end < segments) {
        ASSERT_EQ(k, 0u);
        partial_of[static_cast<size_t>(c)] = piece.item;
      }
      if (piece.begin > 0) {
        ASSERT_EQ(k + 1, pieces.size());
        ASSERT_EQ(partial_of[static_cast<size_t>(c) + 1], piece.item);
        ASSERT_EQ(done[piece.item], piece.begin);
      }
      done[piece.item] += piece.end - piece.begin;
    }
    least = std::min(least, length);
    most = std::max(most, length);
  }
  ASSERT_EQ(static_cast<int>(done.size()), items);
  for (const auto& [item, count] : done) ASSERT_EQ(count, segments) << item;
  EXPECT_LE(most - least, split ? 1 : segments);
}

TEST(ClusterSchedule, EverySegmentIsSomebodysOnce) {
  for (const int segments : {1, 2, 15, 16}) {
    for (const int clusters : {1, 2, 7, 66, 128}) {
      for (int items = 1; items < 3 * clusters + 2; ++items) {
        check(items, segments, clusters, true);
        check(items, segments, clusters, false);
      }
    }
    check(1572, segments, 66, true);  // logits of gpt-oss-20b, two rows of items
  }
}

TEST(ClusterSchedule, EveryOutputIsInOneItem) {
  for (const int64_t rows : {1, 127, 128, 129, 256, 257, 512, 1000, 2048, 2049, 8192}) {
    for (const std::vector<int32_t>& tiles :
         std::vector<std::vector<int32_t>>{{1}, {24}, {25}, {360}, {640}, {512, 64, 64}, {33, 1, 24}}) {
      for (const ClusterShape shape : {ClusterShape{6, 64}, {11, 128}, {24, 128}}) {
        SCOPED_TRACE(testing::Message() << rows << " rows, " << tiles[0] << " tiles of " << tiles.size()
                                        << " parts by " << shape.tiles << " x " << shape.tokens);
        const ClusterGrid grid(tiles.data(), static_cast<int>(tiles.size()), rows, shape);
        std::map<std::vector<int>, int> seen;  // part, tile, token
        for (int i = 0; i < grid.items(); ++i) {
          const ClusterItem both[] = {grid.item(i, 0), grid.item(i, 1)};
          ASSERT_EQ(both[0].part, both[1].part);
          ASSERT_EQ(both[0].first_tile, both[1].first_tile);  // of which each loads a half
          for (const ClusterItem& item : both) {
            ASSERT_LT(item.part, static_cast<int>(tiles.size()));
            ASSERT_LT(item.first_tile, tiles[static_cast<size_t>(item.part)]);
            if (item.first_token < rows) ++seen[{item.part, item.first_tile, item.first_token}];
          }
        }
        size_t expected = 0;
        for (size_t part = 0; part < tiles.size(); ++part) {
          for (int tile = 0; tile < tiles[part]; tile += shape.tiles) {
            for (int token = 0; token < rows; token += shape.tokens, ++expected)
              ASSERT_EQ((seen[{static_cast<int>(part), tile, token}]), 1)
                  << part << " " << tile << " " << token;
          }
        }
        EXPECT_EQ(seen.size(), expected);
      }
    }
  }
}

// q, k, v and the projection of gpt-oss-20b on 66 clusters: one item each, or the same number, where that can
// be.
TEST(ClusterSchedule, WorkItemsAreAsManyAsClusters) {
  const auto choice = [](std::vector<int32_t> tiles, int64_t rows, int64_t columns) {
    const ClusterChoice best(tiles.data(), static_cast<int>(tiles.size()), rows, columns / 64, 66, true);
    const ClusterShape none{0, 0};
    const ClusterShape shape = best.shape < 0 ? none : kClusterShapes[best.shape];
    return std::pair(shape.tiles, shape.tokens);
  };
  EXPECT_EQ(choice({512, 64, 64}, 64, 2880), std::pair(0, 0));
  EXPECT_EQ(choice({512, 64, 64}, 128, 2880), std::pair(10, 64));
  EXPECT_EQ(choice({512, 64, 64}, 256, 2880), std::pair(10, 128));
  EXPECT_EQ(choice({512, 64, 64}, 512, 2880), std::pair(21, 128));
  EXPECT_EQ(choice({640}, 512, 2880), std::pair(20, 128));
  EXPECT_EQ(choice({640}, 1024, 2880), std::pair(20, 128));
  EXPECT_EQ(choice({640}, 2048, 2880), std::pair(20, 128));
  EXPECT_EQ(choice({360}, 128, 4096), std::pair(6, 64));
  EXPECT_EQ(choice({360}, 256, 4096), std::pair(6, 128));
  EXPECT_EQ(choice({360}, 512, 4096), std::pair(11, 128));
  EXPECT_EQ(choice({360}, 1024, 4096), std::pair(23, 128));
  EXPECT_EQ(choice({360}, 2048, 4096), std::pair(23, 128));
}

// Items are split where that saves more than handing over takes.
TEST(ClusterSchedule, ItemsAreCutWhereThatIsFaster) {
  EXPECT_FALSE(ScheduleCost(66, 66, 540, 45, true).split);
  EXPECT_FALSE(ScheduleCost(128, 66, 540, 45, true).split);  // two rounds of 66
  EXPECT_TRUE(ScheduleCost(72, 66, 540, 64, true).split);
  EXPECT_FALSE(ScheduleCost(72, 66, 540, 64, false).split);
  EXPECT_LT(ScheduleCost(72, 66, 540, 64, true).time, ScheduleCost(72, 66, 540, 64, false).time);
  EXPECT_GT(ScheduleCost(66, 66, 540, 1, true).time, ScheduleCost(66, 66, 540, 45, true).time);
}

}  // namespace
}  // namespace millrace::cuda
