// Random schedules of requests that share beginnings, come and are cancelled at random, on engines of random
// options; and the comparison of what they answer with what each answers alone. For tests of one process
// (same_bits_test.cpp) and of ranks (tests/dist).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/test_harness.h"

namespace millrace::test {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  bool chance(int percent) { return pick(1, 100) <= percent; }

 private:
  std::mt19937_64 engine_;
};

constexpr int32_t kVocab = 250;  // ids below this exist in every tiny model
constexpr int32_t kContext = 128;

// Requests that share beginnings, with what each answers alone.
struct Catalogue {
  std::vector<Request> requests;
  std::vector<std::vector<Answer>> alone;
};

// An answer of one or two different tokens: what was said before is a good guess of what comes, so that
// drafts are accepted, several at a time.
inline void repeat_itself(Request& r, Random& random) {
  constexpr float kBeyondOthers = 1000.0f;
  for (int i = random.pick(1, 2); i > 0; --i)
    r.sampling.logit_bias[random.pick(3, kVocab - 1)] = kBeyondOthers;
  r.ignore_end = true;
  r.max_tokens = random.pick(12, 40);
}

inline Request random_request(Random& random, const std::vector<std::vector<int32_t>>& documents) {
  Request r;
  const std::vector<int32_t>& document =
      documents[static_cast<size_t>(random.pick(0, static_cast<int>(documents.size()) - 1))];
  const int shared = random.chance(70) ? random.pick(1, static_cast<int>(document.size())) : 0;
  r.tokens.assign(document.begin(), document.begin() + shared);
  const int own = random.pick(shared == 0 ? 1 : 0, 10);
  for (int i = 0; i < own; ++i) r.tokens.push_back(random.pick(3, kVocab - 1));
  r.max_tokens = random.pick(1, 24);
  if (random.chance(20)) r.embedding = random.chance(60) ? Pooling::kMean : Pooling::kLast;
  r.samples = !r.embedding && random.chance(15) ? random.pick(2, 3) : 1;
  r.ignore_end = random.chance(50);
  r.priority = random.pick(0, 3);
  r.sampling.seed = static_cast<uint64_t>(random.pick(0, 1 << 20));
  if (random.chance(40)) {
    r.sampling.temperature = 0.0f;
  } else {
    r.sampling.temperature = 0.8f;
    if (random.chance(30)) r.sampling.top_k = 20;
    if (random.chance(30)) r.sampling.top_p = 0.9f;
    if (random.chance(30)) r.sampling.repetition_penalty = 1.2f;
  }
  if (random.chance(25)) repeat_itself(r, random);
  if (!r.embedding && r.sampling.seed.value_or(1) % 6 == 0) r.sampling.logprobs = 2;
  return r;
}

inline Catalogue make_catalogue(const std::string& model, int count, const std::string& device,
                                const std::string& kv_type, const std::string& compute) {
  Random random(11);
  std::vector<std::vector<int32_t>> documents(3);
  for (auto& document : documents) {
    for (int i = 0; i < 80; ++i) document.push_back(random.pick(3, kVocab - 1));
  }
  Catalogue catalogue;
  for (int i = 0; i < count; ++i) {
    catalogue.requests.push_back(random_request(random, documents));
    catalogue.alone.push_back(
        run_alone(model, catalogue.requests.back(), 1 + i % 2, device, kv_type, compute));
  }
  return catalogue;
}

inline const Catalogue& catalogue_of(const std::string& model, const std::string& device = "cpu",
                                     const std::string& kv_type = "", const std::string& compute = "full") {
  static std::map<std::string, Catalogue> all;
  const std::string name = model + " " + device + " " + kv_type + " " + compute;
  auto found = all.find(name);
  if (found == all.end())
    found = all.emplace(name, make_catalogue(model, 40, device, kv_type, compute)).first;
  return found->second;
}

struct Counts {
  uint64_t schedules = 0, finished = 0, cancelled = 0, forked = 0, swaps = 0, recomputes = 0, hits = 0,
           from_ram = 0, from_disk = 0, accepted = 0, restarts = 0, embeddings = 0, logprobs = 0,
           picked_by_ranks = 0;
};

// Some requests of the catalogue arriving and being cancelled at random; answers compared at the end.
inline void run_schedule(Harness& h, const Catalogue& catalogue, Random& random, Counts& counts) {
  h.new_loop();
  h.answers.clear();
  struct Arrival {
    int round;
    size_t which;
    int cancel_at;  // -1: never
  };
  std::vector<Arrival> arrivals;
  const int count = random.pick(2, 10);
  for (int i = 0; i < count; ++i) {
    arrivals.push_back({random.pick(0, 30),
                        static_cast<size_t>(random.pick(0, static_cast<int>(catalogue.requests.size()) - 1)),
                        random.chance(15) ? random.pick(0, 40) : -1});
  }
  std::vector<std::pair<size_t, const Arrival*>> submitted;
  for (int round = 0;; ++round) {
    for (const Arrival& a : arrivals) {
      if (a.round == round) submitted.emplace_back(h.submit(catalogue.requests[a.which]), &a);
    }
    for (const auto& [id, a] : submitted) {
      if (a->cancel_at == round) h.streams[id].cancel();
    }
    const bool moved = h.loop->turn();
    h.read_all();
    h.runtime->cache().check_invariants();
    if (moved || round < 40) continue;
    if (h.recorder->running.load() + h.recorder->waiting.load() == 0) break;
    h.runtime->cache().wait(std::chrono::milliseconds(5));
    ASSERT_LT(round, 100000) << "it does not end";
  }
  for (const auto& [id, a] : submitted) {
    const std::vector<Answer>& want = catalogue.alone[a->which];
    const std::vector<Answer>& got = h.answers[id];
    for (size_t s = 0; s < want.size(); ++s) {
      ASSERT_TRUE(got[s].ended);
      if (got[s].finish == FinishReason::kCancelled && a->cancel_at >= 0) {
        ++counts.cancelled;
        ASSERT_LE(got[s].tokens.size(), want[s].tokens.size());
        ASSERT_TRUE(std::equal(got[s].tokens.begin(), got[s].tokens.end(), want[s].tokens.begin()));
        continue;
      }
      ASSERT_EQ(got[s].finish, want[s].finish) << got[s].error;
      ASSERT_EQ(got[s].tokens, want[s].tokens) << "request " << a->which << " sample " << s;
      ASSERT_EQ(got[s].text, want[s].text);
      ASSERT_EQ(got[s].embedding, want[s].embedding) << "request " << a->which;
      ASSERT_EQ(got[s].logprobs, want[s].logprobs) << "request " << a->which;
      counts.logprobs += !got[s].logprobs.empty();
      counts.embeddings += !got[s].embedding.empty();
      ++counts.finished;
      counts.forked += s > 0;
    }
  }
  const kv::CacheStats stats = h.runtime->cache().stats();
  for (size_t g = 0; g < h.runtime->spec().kv_groups.size(); ++g)
    ASSERT_EQ(stats.groups[g].held, 0) << "blocks leak";
  ++counts.schedules;
  counts.swaps += h.recorder->preemptions_swap.load();
  counts.recomputes += h.recorder->preemptions_recompute.load();
  counts.accepted += h.recorder->accepted.load();
  counts.picked_by_ranks += h.recorder->rows_picked_by_ranks.load();
}

inline ExecutorSpec spec_of(const std::string& model) {
  return make_executor_spec(read_config(io::Checkpoint::open(model)), {});
}

inline EngineOptions random_options(Random& random, const std::string& model) {
  EngineOptions o;
  o.model = model;
  o.context = kContext;
  o.threads = random.pick(1, 2);
  o.max_running = random.pick(3, 8);
  o.step_tokens = random.pick(8, 48);
  o.prefix_cache = random.chance(80);
  o.ageing = random.chance(50) ? 100.0 : 0.1;
  o.ram_tier_bytes = random.chance(60) ? static_cast<size_t>(random.pick(1, 64)) << 14 : 0;
  if (random.chance(50)) o.speculation = Speculation::kLookup;
  o.max_draft = random.pick(1, 6);
  if (spec_of(model).state.present() && random.chance(70)) o.states_apart = kBlockTokens * random.pick(1, 4);
  return o;
}

// Schedules of each engine: MILLRACE_TEST_SCHEDULES, or so many.
inline int schedules_wanted(int unless_said) {
  const char* said = std::getenv("MILLRACE_TEST_SCHEDULES");
  return said == nullptr ? unless_said : std::clamp(std::atoi(said), 1, 100000);
}

// From a pool that hardly holds one context to one that holds everybody.
inline std::vector<int32_t> random_pool(Random& random, size_t groups) {
  std::vector<int32_t> blocks;
  const bool tiny = random.chance(70);
  for (size_t g = 0; g < groups; ++g) blocks.push_back(tiny ? random.pick(11, 18) : random.pick(30, 90));
  return blocks;
}

}  // namespace millrace::test
