// Every output is in one CTA's part of one item; every segment of every item is somebody's, once; what is cut
// is begun first by one cluster and ended last by the one before it; shares differ by one segment at most.
#include "backend/cuda/ops/wide_shares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

namespace millrace::cuda {
namespace {

std::vector<LargePiece> pieces_of(const LargeShares& shares, int cluster) {
  std::vector<LargePiece> all;
  LargePiece piece{};
  for (int k = 0; shares.piece(cluster, k, piece); ++k) all.push_back(piece);
  return all;
}

void check(int items, int segments, int clusters, bool cut) {
  SCOPED_TRACE(testing::Message() << items << " items of " << segments << ", " << clusters << " clusters"
                                  << (cut ? ", cut" : ""));
  LargeShares shares{};
  shares.items = items;
  shares.segments = segments;
  shares.clusters = std::min(items, clusters);
  shares.share_out(cut);
  std::map<int, int> done;  // segments of an item
  int least = items * segments, most = 0;
  std::vector<int> handed(static_cast<size_t>(shares.clusters) + 1, -1);  // by whom, which item
  for (int c = shares.clusters - 1; c >= 0; --c) {                        // who hands over before who goes on
    const std::vector<LargePiece> pieces = pieces_of(shares, c);
    ASSERT_FALSE(pieces.empty());
    int length = 0;
    for (size_t k = 0; k < pieces.size(); ++k) {
      const LargePiece& piece = pieces[k];
      ASSERT_LT(piece.begin, piece.end);
      length += piece.end - piece.begin;
      if (piece.end < segments) {
        ASSERT_EQ(k, 0u);
        handed[static_cast<size_t>(c)] = piece.item;
      }
      if (piece.begin > 0) {
        ASSERT_EQ(k + 1, pieces.size());
        ASSERT_EQ(handed[static_cast<size_t>(c) + 1], piece.item);
        ASSERT_EQ(done[piece.item], piece.begin);
      }
      done[piece.item] += piece.end - piece.begin;
    }
    least = std::min(least, length);
    most = std::max(most, length);
  }
  ASSERT_EQ(static_cast<int>(done.size()), items);
  for (const auto& [item, count] : done) ASSERT_EQ(count, segments) << item;
  EXPECT_LE(most - least, cut ? 1 : segments);
}

TEST(WideShares, EverySegmentIsSomebodysOnce) {
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

template <bool kSharesTokens>
void check_grid(const std::vector<int32_t>& tiles, int64_t rows) {
  SCOPED_TRACE(testing::Message() << rows << " rows, " << tiles[0] << " tiles of " << tiles.size()
                                  << " parts");
  const LargeGrid<kSharesTokens> grid(tiles.data(), static_cast<int>(tiles.size()), rows);
  constexpr int kTokens = kSharesTokens ? kLargeTokens : kLargeTokens / kClusterCtas;
  std::map<std::vector<int>, int> seen;  // part, tile, token
  int64_t useless = 0;
  for (int i = 0; i < grid.items(); ++i) {
    const LargeItem both[] = {grid.item(i, 0), grid.item(i, 1)};
    for (const LargeItem& item : both) {
      ASSERT_LT(item.part, static_cast<int>(tiles.size()));
      if (item.first_tile >= tiles[static_cast<size_t>(item.part)] || item.first_token >= rows) {
        ++useless;
        continue;
      }
      ++seen[{item.part, item.first_tile, item.first_token}];
    }
    // What one CTA brings to both is what both want.
    if (!kSharesTokens || both[0].apart) {
      ASSERT_EQ(both[0].first_tile, both[1].first_tile);
    } else {
      ASSERT_EQ(both[0].first_token, both[1].first_token);
    }
  }
  size_t expected = 0;
  int64_t columns = 0;  // of CTAs' weights
  for (size_t part = 0; part < tiles.size(); ++part) {
    for (int tile = 0; tile < tiles[part]; tile += kLargeTiles, ++columns) {
      for (int token = 0; token < rows; token += kTokens, ++expected)
        ASSERT_EQ((seen[{static_cast<int>(part), tile, token}]), 1) << part << " " << tile << " " << token;
    }
  }
  EXPECT_EQ(seen.size(), expected);
  // With shared tokens one CTA of a part, at most, has nothing to do; with shared weights one of a column.
  EXPECT_LE(useless, kSharesTokens ? static_cast<int64_t>(tiles.size()) : columns);
}

TEST(WideShares, EveryOutputIsInOneItem) {
  for (const int64_t rows : {1, 95, 96, 97, 192, 193, 384, 512, 1920, 1921, 2048, 4096, 8191, 8192}) {
    for (const std::vector<int32_t>& tiles : std::vector<std::vector<int32_t>>{
             {1}, {16}, {17}, {32}, {33}, {360}, {512, 64, 64}, {33, 65, 1}, {16, 16, 16}, {25136}}) {
      if (tiles[0] > 1000 && rows > 600) continue;
      check_grid<true>(tiles, rows);
      check_grid<false>(tiles, rows);
    }
  }
}

TEST(WideShares, EveryOutputIsInOneFittedItem) {
  for (const int64_t rows : {1, 127, 128, 129, 256, 257, 512, 1000, 2048, 2049, 8192}) {
    for (const std::vector<int32_t>& tiles :
         std::vector<std::vector<int32_t>>{{1}, {24}, {25}, {360}, {640}, {512, 64, 64}, {33, 1, 24}}) {
      for (const int item_tiles : {6, 11, 24}) {
        SCOPED_TRACE(testing::Message() << rows << " rows, " << tiles[0] << " tiles of " << tiles.size()
                                        << " parts by " << item_tiles);
        const FittedGrid grid(tiles.data(), static_cast<int>(tiles.size()), rows, item_tiles);
        std::map<std::vector<int>, int> seen;  // part, tile, token
        for (int i = 0; i < grid.items(); ++i) {
          const LargeItem both[] = {grid.item(i, 0), grid.item(i, 1)};
          ASSERT_EQ(both[0].part, both[1].part);
          ASSERT_EQ(both[0].first_tile, both[1].first_tile);  // which both bring a half of
          for (const LargeItem& item : both) {
            ASSERT_LT(item.part, static_cast<int>(tiles.size()));
            ASSERT_LT(item.first_tile, tiles[static_cast<size_t>(item.part)]);
            if (item.first_token < rows) ++seen[{item.part, item.first_tile, item.first_token}];
          }
        }
        size_t expected = 0;
        for (size_t part = 0; part < tiles.size(); ++part) {
          for (int tile = 0; tile < tiles[part]; tile += item_tiles) {
            for (int token = 0; token < rows; token += kFittedTokens, ++expected)
              ASSERT_EQ((seen[{static_cast<int>(part), tile, token}]), 1)
                  << part << " " << tile << " " << token;
          }
        }
        EXPECT_EQ(seen.size(), expected);
      }
    }
  }
}

// q, k, v and the projection of gpt-oss-20b on 66 clusters: one item each where that can be.
TEST(WideShares, FittedItemsAreAsManyAsClusters) {
  const auto width = [](std::vector<int32_t> tiles, int64_t rows) {
    return FittedWidth(tiles.data(), static_cast<int>(tiles.size()), rows, 66, true).tiles;
  };
  EXPECT_EQ(width({512, 64, 64}, 256), 10);
  EXPECT_EQ(width({512, 64, 64}, 512), 21);
  EXPECT_EQ(width({640}, 512), 20);
  EXPECT_EQ(width({360}, 256), 6);
  EXPECT_EQ(width({360}, 512), 11);
  EXPECT_EQ(width({360}, 1024), 23);
  EXPECT_EQ(width({360}, 128), 0);   // nothing for the second CTA
  EXPECT_EQ(width({360}, 8192), 0);  // more than two items a cluster
}

}  // namespace
}  // namespace millrace::cuda
