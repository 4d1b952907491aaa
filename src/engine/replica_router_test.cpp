#include "engine/replica_router.h"

#include <gtest/gtest.h>

namespace millrace {
namespace {

std::vector<kv::BlockKey> keys_of(std::initializer_list<uint8_t> blocks) {
  std::vector<kv::BlockKey> keys;
  for (const uint8_t block : blocks) {
    keys.emplace_back();
    keys.back().bytes[0] = block;
  }
  return keys;
}

const std::vector<int64_t> kIdle = {0, 0, 0};

TEST(ReplicaRouter, PromptsThatShareNothingGoWhereFewestAre) {
  ReplicaRouter router(3, 100, 8);
  const std::vector<int64_t> loads = {2, 1, 3};
  EXPECT_EQ(router.choose(keys_of({1}), loads), 1);
  EXPECT_EQ(router.choose(keys_of({}), loads), 1);
}

TEST(ReplicaRouter, APromptFollowsItsPrefix) {
  ReplicaRouter router(3, 100, 8);
  EXPECT_EQ(router.choose(keys_of({1, 2}), std::vector<int64_t>{1, 1, 0}), 2);
  EXPECT_EQ(router.choose(keys_of({1, 2, 3}), std::vector<int64_t>{0, 0, 5}), 2);
  // The longer prefix wins over the shorter one.
  EXPECT_EQ(router.choose(keys_of({1, 9}), std::vector<int64_t>{0, 1, 8}), 0);
  EXPECT_EQ(router.choose(keys_of({1, 9, 4}), kIdle), 0);
  EXPECT_EQ(router.choose(keys_of({1, 2, 7}), kIdle), 2);
}

TEST(ReplicaRouter, NobodyWaitsForAPrefixWhileAnotherHasASlot) {
  ReplicaRouter router(2, 100, 4);
  EXPECT_EQ(router.choose(keys_of({1, 2}), std::vector<int64_t>{0, 1}), 0);
  EXPECT_EQ(router.choose(keys_of({1, 2}), std::vector<int64_t>{4, 3}), 1);
  EXPECT_EQ(router.choose(keys_of({1, 2}), std::vector<int64_t>{5, 6}), 0);  // both are full
}

TEST(ReplicaRouter, WhoHasLostItsRanksGetsNothingWhileAnotherHasThem) {
  ReplicaRouter router(3, 100, 4);
  EXPECT_EQ(router.choose(keys_of({1, 2}), kIdle), 0);
  EXPECT_EQ(router.choose(keys_of({1, 2, 3}), kIdle, {true, false, false}), 1);
  EXPECT_EQ(router.choose(keys_of({1, 2, 3}), std::vector<int64_t>{0, 9, 8}, {true, false, true}), 1);
  EXPECT_EQ(router.choose(keys_of({8}), std::vector<int64_t>{2, 1, 3}, {true, true, true}), 1);  // it waits
}

TEST(ReplicaRouter, ForgetsTheEndsOfTheOldestFirst) {
  ReplicaRouter router(2, 3, 4);
  EXPECT_EQ(router.choose(keys_of({1, 2, 3}), std::vector<int64_t>{0, 0}), 0);
  EXPECT_EQ(router.choose(keys_of({4}), std::vector<int64_t>{0, 1}), 0);  // 3 leaves
  EXPECT_EQ(router.choose(keys_of({1, 2}), std::vector<int64_t>{1, 0}), 0);
  EXPECT_EQ(router.choose(keys_of({3}), std::vector<int64_t>{1, 0}), 1);
}

}  // namespace
}  // namespace millrace
