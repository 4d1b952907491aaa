// Same bits: whatever runs beside a request, however its prompt is cut, whether its prefix is found, in which
// tier, whether it has to give way by swap or by recomputation, with drafts or without: its tokens are those
// it gets alone. Random schedules on tiny models, the cache's invariants checked after every round.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/error.h"
#include "engine/random_schedules.h"

namespace millrace::test {
namespace {

constexpr int kEngines = 40, kSchedules = 25;              // of each engine
constexpr int kHybridEngines = 25, kHybridSchedules = 10;  // of each of eight models: 2,000 in all
constexpr int kFewEngines = 5;                             // where schedules are few

void run_schedules(const std::string& model, uint64_t seed, int engines = kEngines, int most = kSchedules) {
  const int schedules = schedules_wanted(most);  // fewer under a sanitizer, which is many times slower
  if (schedules < most) engines = std::min(engines, kFewEngines);
  const size_t groups = spec_of(model).kv_groups.size();
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
  if (schedules < most) return;
  if (engines < kEngines) {
    EXPECT_GT(counts.swaps + counts.recomputes, 0u);
    EXPECT_GT(counts.hits, 100u);
    EXPECT_GT(counts.forked, 10u);
    EXPECT_GT(counts.accepted, 10u);
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
  EXPECT_GT(counts.logprobs, 100u);
}

TEST(SameBits, RandomSchedulesWithWindows) { run_schedules(kWindowModel, 1); }
TEST(SameBits, RandomSchedulesWithFullAttention) { run_schedules(kLlamaModel, 2); }

// Every kind of state: gated delta with and without decays of channels, Mamba-2 beside attention, in turn
// with it and by itself, convolutions alone, RWKV 7; beside keys and values per head, latent ones and none.
class SameBitsOfHybrids : public testing::TestWithParam<std::string> {};

TEST_P(SameBitsOfHybrids, RandomSchedules) {
  run_schedules(fmt::format("tests/golden/models/{}/model.gguf", GetParam()), 3 + GetParam().size(),
                kHybridEngines, kHybridSchedules);
}

INSTANTIATE_TEST_SUITE_P(Models, SameBitsOfHybrids,
                         testing::Values("qwen3next", "qwen35moe", "kimi-linear", "granitehybrid-moe",
                                         "falcon-h1", "mamba2", "lfm2", "rwkv7"));

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
      Harness h(options, random_pool(random, spec_of(model).kv_groups.size()));
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
