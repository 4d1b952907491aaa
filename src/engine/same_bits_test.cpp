// Same bits: whatever runs beside a request, however its prompt is cut, whether its prefix is found, in which
// tier, whether it has to give way by swap or by recomputation, with drafts or without: its tokens are those
// it gets alone. Random schedules on tiny models, the cache's invariants checked after every round.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>

#include "base/error.h"
#include "engine/test_harness.h"

namespace millrace::test {
namespace {

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

Request random_request(Random& random, const std::vector<std::vector<int32_t>>& documents) {
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
  return r;
}

Catalogue make_catalogue(const std::string& model, int count) {
  Random random(11);
  std::vector<std::vector<int32_t>> documents(3);
  for (auto& document : documents) {
    for (int i = 0; i < 80; ++i) document.push_back(random.pick(3, kVocab - 1));
  }
  Catalogue catalogue;
  for (int i = 0; i < count; ++i) {
    catalogue.requests.push_back(random_request(random, documents));
    catalogue.alone.push_back(run_alone(model, catalogue.requests.back(), 1 + i % 2));
  }
  return catalogue;
}

const Catalogue& catalogue_of(const std::string& model) {
  static std::map<std::string, Catalogue> all;
  auto found = all.find(model);
  if (found == all.end()) found = all.emplace(model, make_catalogue(model, 40)).first;
  return found->second;
}

struct Counts {
  uint64_t schedules = 0, finished = 0, cancelled = 0, forked = 0, swaps = 0, recomputes = 0, hits = 0,
           from_ram = 0, from_disk = 0, accepted = 0, restarts = 0, embeddings = 0;
};

// Some requests of the catalogue arriving and being cancelled at random; answers compared at the end.
void run_schedule(Harness& h, const Catalogue& catalogue, Random& random, Counts& counts) {
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
}

EngineOptions random_options(Random& random, const std::string& model) {
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
  return o;
}

// From a pool that hardly holds one context to one that holds everybody.
std::vector<int32_t> random_pool(Random& random, size_t groups) {
  std::vector<int32_t> blocks;
  const bool tiny = random.chance(70);
  for (size_t g = 0; g < groups; ++g) blocks.push_back(tiny ? random.pick(11, 18) : random.pick(30, 90));
  return blocks;
}

constexpr int kEngines = 40, kSchedules = 25;  // of each engine

// Fewer under a sanitizer, which is many times slower: MILLRACE_TEST_SCHEDULES says how many of each engine.
int schedules_wanted() {
  const char* said = std::getenv("MILLRACE_TEST_SCHEDULES");
  return said == nullptr ? kSchedules : std::clamp(std::atoi(said), 1, kSchedules);
}

void run_schedules(const std::string& model, size_t groups, uint64_t seed, int engines = kEngines) {
  const int schedules = schedules_wanted();
  const Catalogue& catalogue = catalogue_of(model);
  namespace fs = std::filesystem;
  const fs::path directory =
      fs::path(testing::TempDir()) / fmt::format("same_bits_kv_{}_{}", ::getpid(), seed);
  fs::remove_all(directory);
  Counts counts;
  Random random(seed);
  for (int e = 0; e < engines; ++e) {
    EngineOptions options = random_options(random, model);
    if (options.prefix_cache && random.chance(40)) {  // a new process finds what earlier ones left
      options.kv_dir = directory.string();
      options.kv_dir_bytes = size_t{1} << random.pick(18, 24);
      counts.restarts += fs::exists(directory);
    }
    Harness h(options, random_pool(random, groups));
    for (int s = 0; s < schedules; ++s) {
      run_schedule(h, catalogue, random, counts);
      if (testing::Test::HasFatalFailure()) {
        FAIL() << "engine " << e << " schedule " << s << " of seed " << seed;
      }
    }
    if (random.chance(50)) h.runtime->cache().flush();  // or die in the middle of writing
    const kv::CacheStats stats = h.runtime->cache().stats();
    counts.hits += stats.hit_tokens;
    counts.from_ram += stats.ram.hit_tokens;
    counts.from_disk += stats.disk.hit_tokens;
  }
  fs::remove_all(directory);
  std::printf(
      "[  figure  ] %lu schedules: %lu samples compared (%lu forked), %lu cancelled, %lu swaps, %lu "
      "recomputations, %lu tokens found (%lu in RAM, %lu on disk, %lu restarts), %lu drafts right\n",
      counts.schedules, counts.finished, counts.forked, counts.cancelled, counts.swaps, counts.recomputes,
      counts.hits, counts.from_ram, counts.from_disk, counts.restarts, counts.accepted);
  if (schedules < kSchedules) return;
  if (engines < kEngines) {
    EXPECT_GT(counts.swaps + counts.recomputes, 0u);
    EXPECT_GT(counts.hits, 100u);
    EXPECT_GT(counts.forked, 10u);
    return;
  }
  // The paths this is about were taken.
  EXPECT_GT(counts.swaps, 10u);
  EXPECT_GT(counts.recomputes, 10u);
  EXPECT_GT(counts.hits, 1000u);
  EXPECT_GT(counts.from_ram, 100u);
  EXPECT_GT(counts.from_disk, 0u);  // how much depends on when the disk's thread runs
  EXPECT_GT(counts.forked, 100u);
  EXPECT_GT(counts.cancelled, 10u);
  EXPECT_GT(counts.accepted, 10u);
  EXPECT_GT(counts.embeddings, 500u);
}

TEST(SameBits, RandomSchedulesWithWindows) { run_schedules(kWindowModel, 2, 1); }
// Fewer: the paths are those of windows.
TEST(SameBits, RandomSchedulesWithStates) { run_schedules(kStateModel, 2, 3, 5); }
TEST(SameBits, RandomSchedulesWithFullAttention) { run_schedules(kLlamaModel, 1, 2); }

// What a request answers alone is what the plainest loop over a Runtime gives: feed, sample, feed.
TEST(SameBits, AloneIsWhatAPlainLoopGives) {
  for (const std::string& model : {kWindowModel, kLlamaModel}) {
    const Catalogue& catalogue = catalogue_of(model);
    const auto runtime = Runtime::open({.model = model, .context = kContext});
    const std::vector<int32_t>& ends = runtime->end_tokens();
    for (size_t i = 0; i < catalogue.requests.size(); i += 5) {
      const Request& r = catalogue.requests[i];
      if (r.embedding) continue;
      Sampler sampler(r.sampling, runtime->config().vocab);
      sampler.add_prompt(r.tokens);
      kv::Sequence sequence = runtime->make_sequence();
      std::span<const float> logits = runtime->prefill(sequence, r.tokens);
      std::vector<int32_t> tokens;
      while (true) {
        tokens.push_back(sampler.sample(logits).token);
        const bool end = !r.ignore_end && std::count(ends.begin(), ends.end(), tokens.back()) > 0;
        if (end || tokens.size() == static_cast<size_t>(r.max_tokens)) break;
        logits = runtime->prefill(sequence, {&tokens.back(), 1});
      }
      EXPECT_EQ(tokens, catalogue.alone[i][0].tokens);
      if (!r.ignore_end && !tokens.empty() && std::count(ends.begin(), ends.end(), tokens.back()) > 0) {
        tokens.pop_back();
      }
      EXPECT_EQ(runtime->tokenizer().decode(tokens, false), catalogue.alone[i][0].text);
    }
  }
}

// A new process finds what an earlier one left on disk, and answers the same.
TEST(SameBits, AfterARestartFromDisk) {
  namespace fs = std::filesystem;
  for (const std::string& model : {kWindowModel, kStateModel, kLlamaModel}) {
    const Catalogue& catalogue = catalogue_of(model);
    const fs::path directory = fs::path(testing::TempDir()) / fmt::format("same_bits_kv_{}", ::getpid());
    fs::remove_all(directory);
    Counts counts;
    Random random(5);
    uint64_t from_disk = 0;
    for (int life = 0; life < 6; ++life) {
      EngineOptions options = random_options(random, model);
      options.prefix_cache = true;
      options.kv_dir = directory.string();
      options.kv_dir_bytes = size_t{64} << 20;
      Harness h(options, random_pool(random, model == kLlamaModel ? 1 : 2));
      for (int s = 0; s < 3; ++s) {
        run_schedule(h, catalogue, random, counts);
        if (testing::Test::HasFatalFailure()) FAIL() << "life " << life;
      }
      from_disk += h.runtime->cache().stats().disk.hit_tokens;
      h.runtime->cache().flush();
    }
    EXPECT_GT(from_disk, 100u);
    fs::remove_all(directory);
  }
}

}  // namespace
}  // namespace millrace::test
