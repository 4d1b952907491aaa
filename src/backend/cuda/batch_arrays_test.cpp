#include "backend/cuda/batch_arrays.h"

#include <gtest/gtest.h>

#include <numeric>

namespace millrace::cuda {
namespace {

ExecutorSpec two_groups() {
  ExecutorSpec spec;
  spec.max_tokens = 8;
  spec.max_logit_rows = 2;
  spec.max_context = 64;
  spec.kv_groups = {{.window = 0, .num_layers = 1, .num_blocks = 16},
                    {.window = 16, .num_layers = 1, .num_blocks = 8}};
  return spec;
}

// A sequence at its start beside one whose window has left its first block.
struct TwoSequences {
  std::vector<int32_t> tokens{10, 11, 12, 13, 14}, logit_rows{1, 4};
  std::vector<int32_t> full_a{7}, window_a{3}, full_b{1, 2, 5}, window_b{kNoBlock, 0, 4};
  std::vector<SequenceSlice> slices{{0, 2, 0, {full_a.data(), window_a.data()}},
                                    {2, 3, 31, {full_b.data(), window_b.data()}}};
  Batch batch{tokens, slices, logit_rows};
};

std::vector<int32_t> part(const std::vector<int32_t>& all, size_t begin, size_t count) {
  return {all.begin() + static_cast<std::ptrdiff_t>(begin),
          all.begin() + static_cast<std::ptrdiff_t>(begin + count)};
}

TEST(BatchArrays, HoldsEveryPartWhereTheSpecificationSays) {
  const TwoSequences two;
  const BatchArrays arrays(two.batch, two_groups());
  std::vector<int32_t> values(arrays.size(), -100);
  arrays.fill(values.data());
  EXPECT_EQ(part(values, arrays.tokens(), 5), two.tokens);
  EXPECT_EQ(part(values, arrays.positions(), 5), (std::vector<int32_t>{0, 1, 31, 32, 33}));
  EXPECT_EQ(part(values, arrays.sequence_of(), 5), (std::vector<int32_t>{0, 0, 1, 1, 1}));
  EXPECT_EQ(part(values, arrays.sampled_rows(), 5), std::vector<int32_t>(5, -1));
  EXPECT_EQ(part(values, arrays.logit_rows(), 2), two.logit_rows);
  EXPECT_EQ(part(values, arrays.lengths(), 2), (std::vector<int32_t>{2, 34}));
  const auto first = static_cast<int32_t>(arrays.tables());
  EXPECT_EQ(part(values, arrays.table_starts(0), 2), (std::vector<int32_t>{first, first + 1}));
  EXPECT_EQ(part(values, arrays.table_starts(1), 2), (std::vector<int32_t>{first + 4, first + 5}));
  EXPECT_EQ(part(values, arrays.tables(), 8), (std::vector<int32_t>{7, 1, 2, 5, 3, kNoBlock, 0, 4}));
  EXPECT_EQ(arrays.lengths(), arrays.tables() + 8);
  EXPECT_EQ(part(values, arrays.row_starts(), 3), (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(arrays.size(), arrays.row_starts() + 3);
  EXPECT_EQ(arrays.num_sequences(), 2);
  EXPECT_EQ(arrays.most_tokens(), 3);
  EXPECT_FALSE(arrays.single_tokens());
  EXPECT_EQ(arrays.last_position(), 33);
}

// A prompt whose budget of four pages ends within it, beside one token of full attention and an image's
// parts.
TEST(BatchArrays, KnowsWhichRowsChoosePages) {
  ExecutorSpec spec;
  spec.max_tokens = 32;
  spec.max_context = 200;
  spec.heads = spec.kv_heads = 1;
  spec.head_dim = 64;
  spec.kv_groups = {{.window = 0, .num_layers = 1, .num_blocks = 32}};
  spec.page_summaries = true;
  std::vector<int32_t> tokens(14, 1), table(10);
  std::iota(table.begin(), table.end(), 0);
  std::vector<SequenceSlice> slices{
      {0, 1, 100, {table.data()}}, {1, 10, 60, {table.data()}}, {11, 3, 90, {table.data()}}};
  slices[1].sparse_pages = slices[2].sparse_pages = 4;
  slices[2].both_ways = true;
  const BatchArrays arrays({tokens, slices, {}}, spec);
  std::vector<int32_t> values(arrays.size(), -100);
  arrays.fill(values.data());
  EXPECT_TRUE(arrays.sparse());
  EXPECT_EQ(arrays.tables(), arrays.budgets() + 32);
  EXPECT_EQ(part(values, arrays.budgets(), 2), (std::vector<int32_t>{0, 4}));
  EXPECT_EQ(part(values, arrays.budgets() + 10, 2), (std::vector<int32_t>{4, INT32_MAX}));
  ASSERT_EQ(arrays.sparse_rows().size(), 1u);  // positions 64 to 69
  EXPECT_EQ(arrays.sparse_rows()[0].first, 5);
  EXPECT_EQ(arrays.sparse_rows()[0].count, 6);
  ASSERT_EQ(arrays.dense_rows().size(), 2u);
  EXPECT_EQ(arrays.dense_rows()[0].count, 5);
  EXPECT_EQ(arrays.dense_rows()[1].first, 11);
  EXPECT_EQ(arrays.last_read(), 100);
  EXPECT_EQ(arrays.num_chunks(), 3);
  ASSERT_EQ(arrays.num_dense_chunks(), 3);
  EXPECT_EQ(part(values, arrays.chunks() + 8, 4), (std::vector<int32_t>{1, 10, 60, 1}));
  EXPECT_EQ(part(values, arrays.dense_chunks() + 8, 4), (std::vector<int32_t>{1, 4, 60, 1}));
  // Its last token alone: what it reads ends with the budget.
  slices = {{0, 1, 150, {table.data()}}};
  slices[0].sparse_pages = 4;
  const BatchArrays one({std::span(tokens).first(1), slices, {}}, spec);
  EXPECT_EQ(one.last_position(), 150);
  EXPECT_EQ(one.last_read(), 63);
}

// Of layers with a state some new blocks need not be kept; what the first new token reads must be.
TEST(BatchArrays, StateGroupsMayLackNewBlocks) {
  ExecutorSpec spec = two_groups();
  spec.max_tokens = 40;
  spec.kv_groups[1] = {.window = kStateWindow, .num_layers = 1, .num_blocks = 8, .state = true};
  const std::vector<int32_t> tokens(36, 10), full{1, 2, 5, 6}, sparse{3, 4, kNoBlock, 0};
  const SequenceSlice slice{0, 36, 20, {full.data(), sparse.data()}};
  const BatchArrays arrays({tokens, {&slice, 1}, {}}, spec);
  std::vector<int32_t> values(arrays.size(), -100);
  arrays.fill(values.data());
  EXPECT_EQ(part(values, arrays.tables(), 8), (std::vector<int32_t>{1, 2, 5, 6, 3, 4, kNoBlock, 0}));
  for (const auto& lacks : {std::vector<int32_t>{kNoBlock, 4, 1, 0}, {3, kNoBlock, 1, 0}}) {
    const SequenceSlice wrong{0, 36, 20, {full.data(), lacks.data()}};
    EXPECT_DEATH(BatchArrays({tokens, {&wrong, 1}, {}}, spec), "kNoBlock");
  }
}

TEST(BatchArrays, RowsKnowTheirAdapters) {
  TwoSequences two;
  ExecutorSpec spec = two_groups();
  spec.adapter_rank = 4;
  const AdapterTable table(3);
  two.batch.adapters = &table;
  EXPECT_FALSE(BatchArrays(two.batch, spec).adapted());  // it may be that nobody has one
  two.slices[1].adapter = 2;
  const BatchArrays arrays(two.batch, spec);
  EXPECT_TRUE(arrays.adapted());
  std::vector<int32_t> values(arrays.size(), -100);
  arrays.fill(values.data());
  EXPECT_EQ(part(values, arrays.adapters(), 5), (std::vector<int32_t>{-1, -1, 2, 2, 2}));
  EXPECT_EQ(part(values, arrays.logit_adapters(), 2), (std::vector<int32_t>{-1, 2}));
  EXPECT_EQ(arrays.tables(), arrays.logit_adapters() + 2);
  EXPECT_EQ(part(values, arrays.tables(), 8), (std::vector<int32_t>{7, 1, 2, 5, 3, kNoBlock, 0, 4}));
}

TEST(BatchArrays, ALatentModelsChunksAreSixtyFourHeads) {
  const TwoSequences two;
  ExecutorSpec spec = two_groups();
  spec.heads = 30, spec.kv_heads = 1, spec.head_dim = 576;
  spec.latent.rank = 512;
  const BatchArrays arrays(two.batch, spec);  // two tokens a chunk
  EXPECT_EQ(arrays.num_chunks(), 3);
  spec.heads = 128;
  EXPECT_EQ(BatchArrays(two.batch, spec).num_chunks(), 5);
}

TEST(BatchArrays, ChunksOfASequenceThatSeeTheMostComeFirst) {
  const TwoSequences two;
  ExecutorSpec spec = two_groups();
  spec.heads = 96, spec.kv_heads = 1, spec.head_dim = 64;  // two tokens a chunk
  const BatchArrays arrays(two.batch, spec);
  std::vector<int32_t> values(arrays.size(), -100);
  arrays.fill(values.data());
  EXPECT_EQ(arrays.num_chunks(), 3);
  EXPECT_EQ(arrays.chunks() % 4, 0u);
  EXPECT_GE(arrays.chunks(), arrays.tables() + 8);
  EXPECT_EQ(part(values, arrays.chunks(), 12), (std::vector<int32_t>{4, 1, 33, 1, 2, 2, 31, 1, 0, 2, 0, 0}));
  const SequenceSlice slice{0, 1, 2, {two.full_a.data(), two.window_a.data()}};
  const std::vector<int32_t> token{10};
  EXPECT_EQ(BatchArrays({token, {&slice, 1}, {}}, spec).num_chunks(), 0);  // single tokens
}

TEST(BatchArrays, PartsDoNotMoveAsTheBatchGrows) {
  const TwoSequences two;
  const std::vector<int32_t> token{10};
  const SequenceSlice slice{0, 1, 2, {two.full_a.data(), two.window_a.data()}};
  const BatchArrays one({token, {&slice, 1}, {}}, two_groups()), both(two.batch, two_groups());
  EXPECT_EQ(one.positions(), both.positions());
  EXPECT_EQ(one.table_starts(1), both.table_starts(1));
  EXPECT_EQ(one.tables(), both.tables());
  EXPECT_TRUE(one.single_tokens());
}

TEST(BatchArrays, LeavesOutSequencesWithoutTokens) {
  TwoSequences two;
  two.slices.insert(two.slices.begin() + 1, SequenceSlice{2, 0, 9, {two.full_a.data(), two.window_a.data()}});
  two.batch.sequences = two.slices;
  const BatchArrays arrays(two.batch, two_groups());
  std::vector<int32_t> values(arrays.size(), -100);
  arrays.fill(values.data());
  EXPECT_EQ(part(values, arrays.sequence_of(), 5), (std::vector<int32_t>{0, 0, 1, 1, 1}));
}

TEST(BatchArrays, KnowsWhichWindowsAreHeld) {
  const TwoSequences two;
  const BatchArrays arrays(two.batch, two_groups());
  EXPECT_TRUE(arrays.holds_window(0, 0));
  EXPECT_TRUE(arrays.holds_window(1, 16));   // position 31 sees 16 to 31
  EXPECT_FALSE(arrays.holds_window(1, 17));  // it would see 15 as well
  EXPECT_FALSE(arrays.holds_window(1, 0));
}

TEST(BatchArrays, TakesAnEmptyBatch) {
  const BatchArrays arrays(Batch{}, two_groups());
  std::vector<int32_t> values(arrays.size());
  arrays.fill(values.data());
  EXPECT_EQ(arrays.last_position(), -1);
}

TEST(BatchArraysDeathTest, RefusesABlockOutsideThePool) {
  TwoSequences two;
  two.full_b[1] = 16;
  EXPECT_DEATH(BatchArrays(two.batch, two_groups()), "num_blocks");
}

TEST(BatchArraysDeathTest, RefusesAMissingBlockForANewToken) {
  TwoSequences two;
  two.window_b[1] = kNoBlock;  // holds position 31, which this step writes
  EXPECT_DEATH(BatchArrays(two.batch, two_groups()), "first_held");
}

// Rows of an image see one another, each image by itself; a step with some is none of single tokens, whose
// kernels rotate while others read.
TEST(BatchArrays, RowsOfImagesAreRanges) {
  TwoSequences two;
  const std::vector<float> values(4);
  std::vector<GivenRow> given;
  for (int32_t row = 2; row < 5; ++row) given.push_back({row, values.data(), 0});
  two.slices[1].both_ways = true;
  two.batch.given = given;
  const BatchArrays arrays(two.batch, two_groups());
  ASSERT_EQ(arrays.both_ways().size(), 1u);
  EXPECT_EQ(arrays.both_ways()[0].first, 2);
  EXPECT_EQ(arrays.both_ways()[0].count, 3);

  const std::vector<int32_t> token{10};
  const std::vector<SequenceSlice> slice{{0, 1, 0, two.slices[0].tables}};
  const Batch alone{token, slice, {}};
  EXPECT_TRUE(BatchArrays(alone, two_groups()).single_tokens());
  Batch image = alone;
  given = {{0, values.data(), 0}};
  image.given = given;
  EXPECT_FALSE(BatchArrays(image, two_groups()).single_tokens());
}

// Where groups differ in their heads a chunk is what the kernel of each takes.
TEST(BatchArrays, ChunksFitEveryGroup) {
  ExecutorSpec spec = two_groups();
  spec.max_tokens = 64;
  spec.heads = 8;
  spec.kv_heads = 4;
  spec.head_dim = 128;
  std::vector<int32_t> tokens(64), table(4), window(4);
  std::iota(table.begin(), table.end(), 0);
  std::iota(window.begin(), window.end(), 0);
  const std::vector<SequenceSlice> slices{{0, 64, 0, {table.data(), window.data()}}};
  const Batch batch{tokens, slices, {}};
  EXPECT_EQ(BatchArrays(batch, spec).num_chunks(), 1);  // of 64 tokens: two heads of each key
  spec.kv_groups[1].kv_heads = 1;
  spec.kv_groups[1].head_dim = 64;
  EXPECT_EQ(BatchArrays(batch, spec).num_chunks(), 3);  // of 24
}

}  // namespace
}  // namespace millrace::cuda
