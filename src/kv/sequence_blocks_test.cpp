#include "kv/sequence_blocks.h"

#include <gtest/gtest.h>

#include <set>

namespace millrace::kv {
namespace {

TEST(BlockPool, HandsOutEachIdOnceAndTakesItBack) {
  BlockPool pool(3);
  std::set<int32_t> ids = {pool.allocate(), pool.allocate(), pool.allocate()};
  EXPECT_EQ(ids, (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(pool.allocate(), kNoBlock);
  pool.retain(1);
  pool.release(1);
  EXPECT_EQ(pool.free_blocks(), 0) << "a block with a second owner is not free";
  pool.release(1);
  EXPECT_EQ(pool.allocate(), 1);
}

TEST(SequenceBlocks, WindowGroupKeepsItsWindowOnly) {
  BlockPool full(100), window(100);
  SequenceBlocks blocks({&full, &window}, {0, 32});
  for (int32_t position = 0; position < 500; ++position) {
    ASSERT_TRUE(blocks.reserve(1));
    // Every position the new token sees is mapped.
    for (int32_t p = std::max(0, position - 31); p <= position; ++p) {
      ASSERT_NE(blocks.table(1)[p / kBlockTokens], kNoBlock) << "position " << p << " from " << position;
    }
    blocks.advance(1);
    ASSERT_LE(blocks.held_blocks(1), 3) << "32 tokens span at most 3 blocks of 16";
  }
  EXPECT_EQ(blocks.held_blocks(0), blocks_for(500));
  EXPECT_EQ(100 - window.free_blocks(), blocks.held_blocks(1));
}

TEST(SequenceBlocks, ReserveThatDoesNotFitChangesNothing) {
  BlockPool full(4), window(2);
  SequenceBlocks blocks({&full, &window}, {0, 16});
  ASSERT_TRUE(blocks.reserve(16));
  blocks.advance(16);
  EXPECT_FALSE(blocks.reserve(33));
  EXPECT_EQ(full.free_blocks(), 3);
  EXPECT_EQ(window.free_blocks(), 1);
  EXPECT_EQ(blocks.length(), 16);
  EXPECT_TRUE(blocks.reserve(16));
}

TEST(SequenceBlocks, GivesEverythingBack) {
  BlockPool pool(8);
  {
    SequenceBlocks a({&pool}, {0});
    ASSERT_TRUE(a.reserve(40));
    SequenceBlocks b = std::move(a);
    EXPECT_EQ(pool.free_blocks(), 5);
    EXPECT_EQ(b.held_blocks(0), 3);
  }
  EXPECT_EQ(pool.free_blocks(), 8);
}

}  // namespace
}  // namespace millrace::kv
