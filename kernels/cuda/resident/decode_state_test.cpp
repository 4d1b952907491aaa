// The states of a resident decode, every call from every one of them, and the cuts of its keys. Needs no GPU.
#include "kernels/cuda/resident/decode_state.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/resident/decode_plan.h"

namespace millrace::cuda::resident {
namespace {

using Phase = DecodeState::Phase;

struct Allowed {
  bool token, prompt, decode, output;
};
void expect_allowed(const DecodeState& state, const Allowed& allowed, const char* where) {
  EXPECT_EQ(state.may_load_token().empty(), allowed.token) << where << ": " << state.may_load_token();
  EXPECT_EQ(state.may_load_prompt(1).empty(), allowed.prompt) << where << ": " << state.may_load_prompt(1);
  EXPECT_EQ(state.may_decode().empty(), allowed.decode) << where << ": " << state.may_decode();
  EXPECT_EQ(state.may_get_output().empty(), allowed.output) << where << ": " << state.may_get_output();
}

TEST(DecodeState, EveryCallFromEveryState) {
  DecodeState state(3);
  EXPECT_EQ(state.phase(), Phase::kInitialized);
  expect_allowed(state, {true, true, false, false}, "initialized");
  state.prompt_done(1);
  EXPECT_EQ(state.phase(), Phase::kInitialized);
  expect_allowed(state, {true, true, false, false}, "a prompt loaded");
  state.token_done();
  EXPECT_EQ(state.phase(), Phase::kReady);
  EXPECT_EQ(state.length(), 1) << "a token counts when it is decoded";
  expect_allowed(state, {false, false, true, false}, "a token loaded");
  state.decode_done();
  EXPECT_EQ(state.length(), 2);
  expect_allowed(state, {true, true, false, true}, "decoded");
  state.token_done();
  expect_allowed(state, {false, false, true, true}, "the next token loaded");
  state.decode_done();
  expect_allowed(state, {false, false, false, true}, "full");
  state.reset();
  EXPECT_EQ(state.length(), 0);
  EXPECT_EQ(state.max_seq(), 3);
  expect_allowed(state, {true, true, false, false}, "reset");
  state.token_done();
  state.reset();
  expect_allowed(state, {true, true, false, false}, "reset of a loaded token");
}

TEST(DecodeState, SaysWhatWasExpected) {
  DecodeState state(2);
  EXPECT_NE(state.may_decode().find("expected load_qkv"), std::string::npos);
  EXPECT_NE(state.may_get_output().find("expected decode_gpu"), std::string::npos);
  EXPECT_EQ(state.may_load_prompt(3),
            "load_prompt: the sequence has 0 of max_seq 2 tokens, no room for 3 more");
  state.token_done();
  EXPECT_NE(state.may_load_token().find("expected decode_gpu"), std::string::npos);
  EXPECT_NE(state.may_load_prompt(1).find("expected decode_gpu"), std::string::npos);
  state.decode_done();
  EXPECT_NE(state.may_decode().find("decoded already"), std::string::npos);
  state.token_done();
  state.decode_done();
  EXPECT_EQ(state.may_load_token(), "load_qkv: the sequence has 2 of max_seq 2 tokens, no room for 1 more");
}

TEST(DecodePlan, EveryKeyIsOneSplits) {
  for (const int32_t sms : {1, 40, 108, 132, 148}) {
    for (const int32_t tiles : {1, 2, 8, 40, 150}) {
      for (int32_t keys = 1; keys < 20000; keys = keys * 5 / 4 + 1) {
        const SplitPlan plan = plan_splits(keys, tiles, sms);
        ASSERT_GE(plan.splits, 1);
        ASSERT_LE(plan.splits, kMaxSplits);
        ASSERT_EQ(plan.keys_per_split % kKeysPerStep, 0);
        ASSERT_GE(int64_t{plan.splits} * plan.keys_per_split, keys);
        ASSERT_LT(int64_t{plan.splits - 1} * plan.keys_per_split, keys) << "an empty split";
        ASSERT_LE(int64_t{plan.splits} * tiles, max_partials(tiles, sms)) << "more than the workspace holds";
        if (keys <= kMaxKeysOfOneBlock) {
          ASSERT_EQ(plan.splits, 1);
        }
      }
    }
  }
}

TEST(DecodePlan, ClustersAreAsLargeAsCanBeHad) {
  for (const int32_t most : {0, 8, 16}) {
    for (int32_t keys = 1; keys < 200000; keys = keys * 5 / 4 + 1) {
      const SplitPlan plan = plan_decode(keys, 2, 132, most);
      ASSERT_GE(int64_t{plan.splits} * plan.keys_per_split, keys);
      ASSERT_LE(plan.splits, plan.cluster ? most : kMaxSplits);
      if (keys <= kMaxKeysOfOneBlock) {
        ASSERT_EQ(plan.splits, 1);
      }
    }
  }
  EXPECT_TRUE(plan_decode(1024, 2, 132, 16).cluster);
  EXPECT_FALSE(plan_decode(100000, 2, 132, 16).cluster) << "more blocks count for more";
}

TEST(ResidentShape, QueryHeadsOfAKvHeadAreRowsOfItsTile) {
  constexpr ResidentShape qwen{14, 2, 64, 8192};
  EXPECT_EQ(qwen.group(), 7);
  EXPECT_EQ(qwen.tile_rows(), 8);
  EXPECT_EQ(qwen.tiles(), 2);
  constexpr ResidentShape wide{40, 1, 80, 16};
  EXPECT_EQ(wide.tile_rows(), 16);
  EXPECT_EQ(wide.tiles(), 3);
  EXPECT_EQ(wide.padded_dim(), 128);
}

}  // namespace
}  // namespace millrace::cuda::resident
