// Every segment of every item is somebody's, once; what is cut is begun first by one cluster and ended last
// by the one before it; shares differ by one segment at most.
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

}  // namespace
}  // namespace millrace::cuda
