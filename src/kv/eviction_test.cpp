#include "kv/eviction.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <unordered_map>

namespace millrace::kv {
namespace {

TEST(Heap, AgreesWithASet) {
  std::mt19937 random(1);
  Heap heap;
  std::map<int32_t, Heap::Priority> model;
  for (int i = 0; i < 20000; ++i) {
    const auto id = static_cast<int32_t>(random() % 50);
    if (random() % 3 == 0) {
      heap.erase(id);
      model.erase(id);
    } else {
      heap.set(id, model[id] = {random() % 20, random() % 3});
    }
    ASSERT_EQ(heap.contains(id), model.count(id) == 1);
    ASSERT_EQ(heap.size(), static_cast<int32_t>(model.size()));
    if (model.empty()) continue;
    std::set<std::pair<Heap::Priority, int32_t>> order;
    for (const auto& [one, priority] : model) order.insert({priority, one});
    ASSERT_EQ(heap.top(), order.begin()->second);
  }
}

TEST(Evictor, PoliciesChooseWhatTheySay) {
  Evictor lru(Eviction::kLru, 10, 1), lfu(Eviction::kLfu, 10, 1);
  for (Evictor* evictor : {&lru, &lfu}) {
    EXPECT_EQ(evictor->choose(), kNoBlock);
    evictor->add(3, 100, 5);
    evictor->add(4, 50, 9);
    evictor->add(5, 70, 2);
  }
  EXPECT_EQ(lru.choose(), 4);
  EXPECT_EQ(lfu.choose(), 5);
  lru.remove(4);
  EXPECT_EQ(lru.choose(), 5);
  Evictor random(Eviction::kRandom, 10, 1);
  std::set<int32_t> chosen;
  for (int32_t block = 0; block < 5; ++block) random.add(block, 1, 1);
  for (int i = 0; i < 200; ++i) chosen.insert(random.choose());
  EXPECT_EQ(chosen.size(), 5u);
}

// A cache of single blocks without prefixes: the bare policy. Returns the hit rate.
double replay(Eviction policy, const std::vector<int32_t>& trace, int32_t blocks) {
  Evictor evictor(policy, blocks, 1);
  struct Entry {
    int32_t block;
    uint64_t uses;
  };
  std::unordered_map<int32_t, Entry> cached;
  std::vector<int32_t> owner(static_cast<size_t>(blocks), -1);
  const auto key_of = [](int32_t id) { return child_key({}, std::span(&id, 1)); };
  uint64_t tick = 0, hits = 0;
  int32_t used = 0;
  for (const int32_t id : trace) {
    ++tick;
    if (const auto it = cached.find(id); it != cached.end()) {
      ++hits;
      evictor.add(it->second.block, tick, ++it->second.uses);
      continue;
    }
    int32_t block = used;
    if (used < blocks) {
      ++used;
    } else {
      block = evictor.choose();
      evictor.remove(block);
      evictor.evicted(key_of(owner[block]), cached[owner[block]].uses);
      cached.erase(owner[block]);
    }
    evictor.returned(key_of(id));
    owner[block] = id;
    cached[id] = {block, 0};
    evictor.add(block, tick, 0);
  }
  return static_cast<double>(hits) / static_cast<double>(trace.size());
}

TEST(Evictor, AdaptiveIsNearTheBestOnEveryLoad) {
  std::mt19937 random(3);
  std::vector<int32_t> recent, frequent, loop;
  for (int32_t i = 0; i < 30000; ++i) {
    // What is asked for drifts: old favourites are worth nothing.
    recent.push_back(i / 10 + static_cast<int32_t>(random() % 80));
    // A few blocks are asked for all the time, between scans of blocks that never come again.
    frequent.push_back(random() % 3 != 0 ? static_cast<int32_t>(random() % 70) : 1000 + i);
    // A loop that does not quite fit: the least recent is always what comes next.
    loop.push_back(i % 130);
  }
  const std::pair<const char*, const std::vector<int32_t>*> loads[] = {
      {"drift", &recent}, {"scan", &frequent}, {"loop", &loop}};
  double worst_loss = 0;
  for (const auto& [name, trace] : loads) {
    double best = 0, worst = 1;
    for (const Eviction policy : {Eviction::kLru, Eviction::kLfu, Eviction::kRandom}) {
      const double rate = replay(policy, *trace, 100);
      best = std::max(best, rate);
      worst = std::min(worst, rate);
    }
    const double adaptive = replay(Eviction::kAdaptive, *trace, 100);
    std::printf("%s: fixed policies %.3f to %.3f, adaptive %.3f\n", name, worst, best, adaptive);
    EXPECT_GT(best, worst + 0.05) << name << ": the load does not tell policies apart";
    EXPECT_GT(adaptive, worst + 0.6 * (best - worst)) << name;
    worst_loss = std::max(worst_loss, best - adaptive);
  }
  EXPECT_LT(worst_loss, 0.2);
}

// The room for blocks never found again follows the ghosts: up when such a block comes back, down when one
// that had been found again does.
TEST(Evictor, RoomForBlocksSeenOnceFollowsTheGhosts) {
  const auto key_of = [](int32_t id) { return child_key({}, std::span(&id, 1)); };
  Evictor evictor(Eviction::kAdaptive, 100, 1);
  const double start = evictor.once_target();
  for (int32_t block = 0; block < 60; ++block) evictor.add(block, static_cast<uint64_t>(block), 0);
  for (int32_t block = 60; block < 100; ++block) evictor.add(block, static_cast<uint64_t>(block - 60), 3);
  // More than the target were seen once: the least recent of them goes, whatever an expert would say.
  ASSERT_EQ(evictor.choose(), 0);
  evictor.remove(0);
  evictor.evicted(key_of(0), 0);
  evictor.returned(key_of(0));
  EXPECT_GT(evictor.once_target(), start);
  // Now fewer: an expert chooses, and its mistake lowers the target.
  for (int32_t block = 1; block < 50; ++block) evictor.remove(block);
  const double raised = evictor.once_target();
  evictor.choose();
  evictor.evicted(key_of(1000), 3);
  evictor.returned(key_of(1000));
  EXPECT_LT(evictor.once_target(), raised);
}

}  // namespace
}  // namespace millrace::kv
