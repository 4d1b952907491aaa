// ModelSet without a server: who loads, who waits, who has to go. The models are tests/golden's.
#include "model_set.h"
#include "engine/stats_sum.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

namespace millrace::server {
namespace {

ModelSpec golden(const std::string& name) {
  ModelSpec spec{.name = name, .aliases = {name + ":latest"}};
  spec.engine.model = "tests/golden/models/" + name + "/model.gguf";
  spec.engine.context = 64;
  spec.engine.max_running = 2;
  spec.engine.threads = 1;
  return spec;
}

struct Loaded {
  ModelLease lease;
  std::optional<ApiError> error;
};
std::future<Loaded> start(ModelSet& set, const std::string& name) {
  auto promise = std::make_shared<std::promise<Loaded>>();
  set.load(name, [promise](ModelLease lease, std::optional<ApiError> error) {
    promise->set_value({std::move(lease), std::move(error)});
  });
  return promise->get_future();
}

bool becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 3000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TEST(ModelSet, LoadsOnceForAllWhoAsk) {
  ModelSet set({golden("llama3"), golden("qwen3")}, {}, Log(true));
  EXPECT_EQ(set.lease("llama3"), nullptr);
  std::vector<std::future<Loaded>> all;
  for (int i = 0; i < 8; ++i) all.push_back(start(set, i % 2 == 0 ? "llama3" : "llama3:latest"));
  std::vector<ModelLease> leases;
  for (std::future<Loaded>& one : all) leases.push_back(one.get().lease);
  for (const ModelLease& lease : leases) EXPECT_EQ(lease, leases.front());
  ASSERT_NE(leases.front(), nullptr);
  const ModelSet::Status status = set.status("llama3");
  EXPECT_EQ(status.loads, 1u);
  EXPECT_EQ(status.leases, 8);
  EXPECT_EQ(status.state, ModelSet::State::kLoaded);
  EXPECT_EQ(set.status("qwen3").state, ModelSet::State::kUnloaded);
  leases.clear();
  EXPECT_EQ(set.status("llama3").leases, 0);
}

TEST(ModelSet, TheLeastRecentlyUsedGivesWayAndNobodyWhileLeased) {
  ModelSet set({golden("llama3"), golden("qwen3"), golden("mistral")}, {.max_models = 2}, Log(true));
  const auto loaded = [&](const std::string& name) { return set.status(name).info.has_value(); };
  start(set, "llama3").get();
  start(set, "qwen3").get();
  set.lease("llama3");  // used again: qwen3 is the oldest now
  start(set, "mistral").get();
  EXPECT_TRUE(loaded("llama3") && loaded("mistral") && !loaded("qwen3"));
  Loaded held = start(set, "llama3").get();
  ModelLease also = set.lease("mistral");
  const Loaded refused = start(set, "qwen3").get();
  ASSERT_TRUE(refused.error);
  EXPECT_EQ(refused.error->status, 503);
  EXPECT_GT(refused.error->retry_after_s, 0);
  EXPECT_TRUE(loaded("llama3") && loaded("mistral"));
  also = nullptr;
  EXPECT_FALSE(start(set, "qwen3").get().error);
  EXPECT_TRUE(loaded("llama3") && !loaded("mistral"));
}

TEST(ModelSet, WhatIsKeptIsKept) {
  ModelSpec kept = golden("llama3");
  kept.keep = true;
  ModelSet set({kept, golden("qwen3")}, {.max_models = 1}, Log(true));
  start(set, "llama3").get();
  EXPECT_TRUE(start(set, "qwen3").get().error);
  EXPECT_THROW(set.unload("llama3"), ApiError);
  set.stay("llama3", 0);
  EXPECT_FALSE(set.status("llama3").unload_in_s);
  EXPECT_NE(set.lease("llama3"), nullptr);
}

TEST(ModelSet, UnloadsByAgeAndByHandAndCountsOn) {
  ModelSet set({golden("llama3")}, {.unload_after_s = 0.05}, Log(true));
  const auto gone = [&] { return set.status("").state == ModelSet::State::kUnloaded; };
  {
    const Loaded held = start(set, "").get();
    held.lease->engine().submit({.tokens = {1, 2, 3}, .max_tokens = 1}).next();
    set.unload("llama3");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_TRUE(set.status("").info) << "unloaded while it was leased";
    EXPECT_EQ(set.status("").state, ModelSet::State::kUnloading);
  }
  EXPECT_TRUE(becomes(gone));
  EXPECT_EQ(set.stats("llama3").submitted, 1u);
  start(set, "").get();
  EXPECT_TRUE(becomes(gone)) << "not unloaded by age";
  EXPECT_EQ(set.status("").loads, 2u);
  EXPECT_EQ(set.stats().submitted, 1u);
}

TEST(ModelSet, MemoryDecidesWhoFits) {
  ModelSpec first = golden("llama3"), second = golden("qwen3");
  first.engine.kv_tokens = second.engine.kv_tokens = 100000;
  size_t bytes = 0;
  {
    ModelSet set({first, second}, {}, Log(true));
    const Loaded a = start(set, "llama3").get(), b = start(set, "qwen3").get();
    bytes = std::max(set.status("llama3").memory_bytes, set.status("qwen3").memory_bytes);
  }
  ModelSet set({first, second}, {.memory_bytes = bytes + bytes / 4}, Log(true));
  Loaded held = start(set, "llama3").get();
  ASSERT_FALSE(held.error);
  EXPECT_EQ(start(set, "qwen3").get().error->code, "models_busy");
  held.lease = nullptr;
  EXPECT_FALSE(start(set, "qwen3").get().error);
  EXPECT_FALSE(set.status("llama3").info);
  ModelSet none({first}, {.memory_bytes = 1 << 20}, Log(true));
  EXPECT_EQ(start(none, "llama3").get().error->code, "out_of_memory");
}

TEST(ModelSet, SaysWhatIsWrong) {
  ModelSpec missing = golden("llama3");
  missing.engine.model = "tests/golden/nowhere.gguf";
  ModelSet set({missing, golden("qwen3")}, {}, Log(true));
  const Loaded failed = start(set, "llama3").get();
  ASSERT_TRUE(failed.error);
  EXPECT_EQ(failed.error->status, 500);
  EXPECT_EQ(failed.error->message.find("tests/golden"), std::string::npos) << failed.error->message;
  EXPECT_EQ(set.status("llama3").failed_loads, 1u);
  for (const char* name : {"", "gpt-4"}) {
    try {
      set.lease(name);
      FAIL() << name;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, *name == 0 ? 400 : 404);
      EXPECT_NE(error.message.find("'qwen3'"), std::string::npos);
    }
  }
  EXPECT_THROW(ModelSet({golden("llama3"), golden("llama3")}, {}, Log(true)), Error);
  set.stop();
  EXPECT_EQ(start(set, "qwen3").get().error->status, 503);
}

TEST(StatsSum, MeansAreWeighedAndGaugesStayBehind) {
  EngineStats a, b;
  a.steps = 1;
  a.mean_batch = 4;
  a.running = 2;
  a.first_token.counts[3] = 5;
  b.steps = 3;
  b.mean_batch = 8;
  b.finished = 7;
  add_stats(b, counters_of(a));
  EXPECT_EQ(b.steps, 4u);
  EXPECT_DOUBLE_EQ(b.mean_batch, 7);
  EXPECT_EQ(b.running, 0);
  EXPECT_EQ(b.finished, 7u);
  EXPECT_EQ(b.first_token.counts[3], 5u);
}

}  // namespace
}  // namespace millrace::server
