// The flat tables, and the two ways of merging against each other.
#include "tokenizer/bpe.h"

#include <gtest/gtest.h>

namespace millrace {
namespace {

TEST(TokenTable, FindsWhatItHolds) {
  TokenTable table;
  for (uint32_t id = 0; id < 1000; ++id) ASSERT_TRUE(table.add(id * 2, "token " + std::to_string(id), true));
  EXPECT_FALSE(table.add(7, "token 3", true));
  EXPECT_TRUE(table.add(7, "hidden", false));
  EXPECT_EQ(table.find("hidden"), std::nullopt);
  for (uint32_t id = 0; id < 1000; ++id) ASSERT_EQ(table.find("token " + std::to_string(id)), id * 2);
  EXPECT_EQ(table.find("token 1000"), std::nullopt);
  EXPECT_EQ(table.size(), 1999u);
  EXPECT_FALSE(table.has(9));
  EXPECT_EQ(table.bytes(8), "token 4");
}

TEST(MergeTable, LaterRankCounts) {
  MergeTable merges;
  EXPECT_EQ(merges.find(1, 2).rank, MergeTable::kNone);
  merges.add(1, 2, 5, 9);
  merges.add(1, 2, 7, 9);
  EXPECT_EQ(merges.find(1, 2).rank, 7u);
  EXPECT_EQ(merges.find(2, 1).rank, MergeTable::kNone);
}

// Merging by the definition: the lowest rank in the whole word, the leftmost of them, one at a time.
std::vector<uint32_t> merge_naively(const MergeTable& merges, std::vector<uint32_t> symbols) {
  while (true) {
    size_t best = symbols.size();
    uint32_t rank = MergeTable::kNone;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const uint32_t r = merges.find(symbols[i], symbols[i + 1]).rank;
      if (r < rank) {
        rank = r;
        best = i;
      }
    }
    if (best == symbols.size()) return symbols;
    symbols[best] = merges.find(symbols[best], symbols[best + 1]).symbol;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(MergeSymbols, ShortAndLongWordsFollowTheDefinition) {
  uint32_t seed = 3;
  const auto random = [&seed](uint32_t n) {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 16) % n;
  };
  for (int round = 0; round < 300; ++round) {
    MergeTable merges;
    const uint32_t letters = 2 + random(4);
    for (uint32_t rank = 0; rank < 40; ++rank)
      merges.add(random(letters + rank), random(letters + rank), rank, letters + rank);
    MergeScratch scratch;
    for (uint32_t n = 1 + random(150); n > 0; --n) scratch.symbols.push_back(random(letters));
    const std::vector<uint32_t> expected = merge_naively(merges, scratch.symbols);
    merge_symbols(merges, scratch);
    ASSERT_EQ(scratch.symbols, expected) << "round " << round;
  }
}

}  // namespace
}  // namespace millrace
