#include "backend/cuda/sample_batch.h"

#include <gtest/gtest.h>

#include <cstring>

namespace millrace::cuda {
namespace {

TEST(SampleBatch, ListsLieBehindTheRows) {
  const std::vector<TokenCount> counted = {{3, 1}, {9, 0}, {4, 7}};
  const std::vector<TokenBias> bias = {{8, -1.5f}};
  const std::vector<uint64_t> allowed = {5, 6};
  std::vector<SampleRow> rows(4);
  rows[0].wanted = true;
  rows[1].wanted = rows[1].draw = true;
  rows[1].counted = counted;
  rows[1].allowed = allowed;
  rows[1].uniform = 0.25;
  rows[3].wanted = true;
  rows[3].bias = bias;
  rows[3].logprobs = 2;
  SampleBatch batch;
  batch.lay_out(rows);
  EXPECT_FALSE(batch.plain_greedy());
  EXPECT_TRUE(batch.details());
  EXPECT_TRUE(batch.skips(2));
  EXPECT_EQ(batch.logprobs(3), 2);
  ASSERT_EQ(batch.bytes(), 4 * sizeof(SampleParams) + 6 * 8);
  std::vector<uint64_t> out(batch.bytes() / 8);
  batch.fill(rows, out.data());
  const auto* params = reinterpret_cast<const SampleParams*>(out.data());
  EXPECT_EQ(params[0].mode, SampleParams::kGreedy);
  EXPECT_EQ(params[0].allowed, -1);
  EXPECT_EQ(params[1].mode, SampleParams::kDraw);
  EXPECT_EQ(params[1].uniform, 0.25);
  EXPECT_EQ(params[1].num_counted, 3);
  EXPECT_EQ(std::memcmp(&out[static_cast<size_t>(params[1].counted)], counted.data(), 24), 0);
  EXPECT_EQ(out[static_cast<size_t>(params[1].allowed) + 1], 6u);
  EXPECT_EQ(params[2].mode, SampleParams::kSkip);
  EXPECT_EQ(std::memcmp(&out[static_cast<size_t>(params[3].bias)], bias.data(), 8), 0);
}

TEST(SampleBatch, WhatTheKernelDoesNotDoIsLeftOut) {
  const std::vector<TokenCount> counted(100, {1, 1});
  std::vector<SampleRow> rows(3);
  for (SampleRow& row : rows) row.wanted = true;
  rows[0].logprobs = kMaxTopLogits + 1;
  rows[1].counted = counted;
  SampleBatch batch;
  batch.lay_out(rows, 3 * sizeof(SampleParams) + 500);
  EXPECT_TRUE(batch.skips(0));
  EXPECT_TRUE(batch.skips(1));
  EXPECT_FALSE(batch.skips(2));
  EXPECT_TRUE(batch.plain_greedy());
  EXPECT_EQ(batch.bytes(), 3 * sizeof(SampleParams));
}

}  // namespace
}  // namespace millrace::cuda
