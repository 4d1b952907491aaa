// Random schedules on a device that picks tokens itself, where the engine launches steps before it has read
// the last one's tokens: whatever arrives, ends, is cancelled or has to give way meanwhile, every answer is
// what the request gets alone. The device is a stand-in on top of the CPU, and those that
// MILLRACE_TEST_DEVICES names.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <sstream>

#include "base/error.h"
#include "engine/test_harness.h"

namespace millrace::test {
namespace {

class AheadSchedules {
 public:
  AheadSchedules(std::string device, bool stand_in, uint32_t seed)
      : device_(std::move(device)), stand_in_(stand_in), random_(seed) {}

  void run(const std::string& model, int engines, int schedules) {
    make_requests(model);
    for (int e = 0; e < engines && !testing::Test::HasFatalFailure(); ++e) {
      const EngineOptions options = make_options(model);
      std::vector<int32_t> pool;  // for one context at least, so that some have to give way
      for (int g = 0; g < (model == kWindowModel ? 2 : 1); ++g)
        pool.push_back(chance(70) ? between(11, 16) : 40);
      SamplingExecutor* sampling = nullptr;
      const auto change = stand_in_ ? sampling_device(&sampling) : std::function<void(RuntimeSetup&)>();
      Harness h(options, pool, nullptr, change);
      for (int s = 0; s < schedules && !testing::Test::HasFatalFailure(); ++s) {
        h.new_loop();
        h.answers.clear();
        schedule(h);
        gave_way += h.recorder->preemptions_swap.load() + h.recorder->preemptions_recompute.load();
      }
      if (sampling != nullptr) ahead += sampling->steps_ahead;
    }
  }

  int compared = 0, cancelled = 0, ahead = 0;
  uint64_t gave_way = 0;

 private:
  int between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }

  EngineOptions make_options(const std::string& model) {
    EngineOptions o;
    o.model = model;
    o.device = device_;
    o.threads = 1;
    o.context = 128;
    o.max_running = between(3, 8);
    o.step_tokens = between(8, 48);
    o.prefix_cache = chance(70);
    o.ram_tier_bytes = chance(60) ? static_cast<size_t>(between(1, 64)) << 14 : 0;
    if (chance(20)) o.speculation = Speculation::kLookup;
    return o;
  }

  // Beginnings that are shared, parameters of every kind, and what each answers alone.
  void make_requests(const std::string& model) {
    requests_.clear();
    alone_.clear();
    for (int i = 0; i < 20; ++i) {
      Request r;
      const int shared = between(3, 70);
      for (int t = 0; t < shared; ++t) r.tokens.push_back(3 + (t * 37 + i % 3) % 200);
      r.tokens.push_back(3 + i);
      r.max_tokens = between(1, 40);
      r.priority = between(0, 3);
      r.ignore_end = chance(60);
      r.sampling.seed = static_cast<uint64_t>(i);
      r.sampling.temperature = chance(40) ? 0.0f : 0.9f;
      if (chance(25)) r.sampling.top_p = 0.8f;
      if (chance(25)) r.sampling.top_k = 15;
      if (chance(10)) r.sampling.presence_penalty = 0.6f;
      if (chance(15)) r.sampling.logprobs = 4;
      if (chance(10)) r.samples = 2;
      if (r.samples == 1 && chance(10)) r.embedding = Pooling::kMean;
      if (r.embedding) r.sampling = {};
      requests_.push_back(r);
      alone_.push_back(run_alone(model, r, 1, device_));
    }
  }

  void schedule(Harness& h) {
    struct Arrival {
      int round, cancel_at;
      size_t which, id;
    };
    std::vector<Arrival> arrivals;
    for (int i = between(2, 9); i > 0; --i) {
      arrivals.push_back({between(0, 25), chance(15) ? between(0, 40) : -1,
                          static_cast<size_t>(between(0, static_cast<int>(requests_.size()) - 1)), 0});
    }
    for (int round = 0;; ++round) {
      ASSERT_LT(round, 20000) << "it does not end";
      for (Arrival& a : arrivals) {
        if (a.round == round) a.id = h.submit(requests_[a.which]);
      }
      for (const Arrival& a : arrivals) {
        if (a.cancel_at == round && a.round <= round) h.streams[a.id].cancel();
      }
      const bool moved = h.loop->turn();
      h.read_all();
      h.runtime->cache().check_invariants();
      if (!moved && round > 40 && h.recorder->running.load() + h.recorder->waiting.load() == 0) break;
    }
    for (const Arrival& a : arrivals) compare(h.answers[a.id], alone_[a.which], a.cancel_at >= a.round);
  }

  void compare(const std::vector<Answer>& got, const std::vector<Answer>& want, bool may_be_cancelled) {
    for (size_t s = 0; s < want.size(); ++s) {
      ASSERT_TRUE(got[s].ended);
      if (may_be_cancelled && got[s].finish == FinishReason::kCancelled) {
        ++cancelled;
        ASSERT_LE(got[s].tokens.size(), want[s].tokens.size());
        ASSERT_TRUE(std::equal(got[s].tokens.begin(), got[s].tokens.end(), want[s].tokens.begin()));
        continue;
      }
      ASSERT_EQ(got[s].finish, want[s].finish) << got[s].error;
      ASSERT_EQ(got[s].tokens, want[s].tokens);
      ASSERT_EQ(got[s].logprobs, want[s].logprobs);
      ASSERT_EQ(got[s].text, want[s].text);
      ASSERT_EQ(got[s].embedding, want[s].embedding);
      ++compared;
    }
  }

  std::string device_;
  bool stand_in_;
  std::mt19937 random_;
  std::vector<Request> requests_;
  std::vector<std::vector<Answer>> alone_;
};

TEST(Ahead, EveryAnswerIsWhatTheRequestGetsAlone) {
  AheadSchedules schedules("cpu", true, 1);
  schedules.run(kWindowModel, 8, 8);
  schedules.run(kLlamaModel, 8, 8);
  std::printf("[  figure  ] stand-in schedules: %d compared, %d cancelled, %d steps ahead, %lu gave way\n",
              schedules.compared, schedules.cancelled, schedules.ahead, schedules.gave_way);
  EXPECT_GT(schedules.compared, 500);
  EXPECT_GT(schedules.cancelled, 10);
  EXPECT_GT(schedules.ahead, 500);
  EXPECT_GT(schedules.gave_way, 20u);
}

// A step that is launched ahead has each row's adapter, as one that is not.
TEST(Ahead, RowsKeepTheirAdapters) {
  EngineOptions options = small_options(kLlamaModel, 2048);
  options.prefix_cache = false;
  options.adapters = {"one=tests/golden/adapters/llama3/peft",
                      "two=tests/golden/adapters/llama3-patterns/peft"};
  SamplingExecutor* sampling = nullptr;
  Harness ahead(options, {}, nullptr, sampling_device(&sampling)), behind(options);
  for (const char* adapter : {"", "one", "two", "one"}) {
    std::vector<int32_t> tokens;
    for (int t = 0; t < 20; ++t) tokens.push_back(3 + t * 7);
    Request r = greedy_request(tokens, 12);
    r.adapter = adapter;
    ahead.submit(r);
    behind.submit(r);
  }
  ahead.run();
  behind.run();
  EXPECT_GT(sampling->steps_ahead, 5);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(ahead.answers[i][0].tokens, behind.answers[i][0].tokens) << i;
  EXPECT_NE(behind.answers[0][0].tokens, behind.answers[1][0].tokens);
}

TEST(Ahead, OnOtherDevices) {
  const char* variable = std::getenv("MILLRACE_TEST_DEVICES");
  std::istringstream list(variable != nullptr ? variable : "");
  bool any = false;
  for (std::string device; std::getline(list, device, ',');) {
    if (device == "cpu") continue;
    any = true;
    AheadSchedules schedules(device, false, 2);
    schedules.run(kWindowModel, 5, 10);
    schedules.run(kLlamaModel, 5, 10);
    std::printf("[  figure  ] %s schedules: %d compared, %lu gave way\n", device.c_str(), schedules.compared,
                schedules.gave_way);
  }
  if (!any) GTEST_SKIP() << "MILLRACE_TEST_DEVICES names no other device";
}

}  // namespace
}  // namespace millrace::test
