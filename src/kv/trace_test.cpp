// Token hit rates on made-up loads, against an exact simulation that remembers every sequence and compares
// tokens.
#include "kv/trace.h"

#include <gtest/gtest.h>

#include "kv/cache.h"
#include "kv/test_model.h"

namespace millrace::kv {
namespace {

// What a cache that never forgets finds: the longest common prefix with the full blocks of any earlier
// sequence, short of the last token. Less than a block is not looked for.
int32_t naive_hit(const std::vector<std::vector<int32_t>>& seen, const std::vector<int32_t>& prompt) {
  size_t best = 0;
  for (const std::vector<int32_t>& old : seen) {
    const size_t most = std::min(prompt.size() - 1, old.size() / kBlockTokens * kBlockTokens);
    size_t common = 0;
    while (common < most && prompt[common] == old[common]) ++common;
    best = std::max(best, common);
  }
  return best < kBlockTokens ? 0 : static_cast<int32_t>(best);
}

struct Result {
  double rate = 0, exact = 0;
  bool same = true;  // hit for hit
  CacheStats stats;
};

Result replay(const std::vector<TraceRequest>& trace, const std::vector<GroupOptions>& groups,
              Eviction eviction) {
  CacheOptions options;
  options.groups = groups;
  options.eviction = eviction;
  TestStore store(groups);
  Cache cache(options, store);
  std::vector<std::vector<int32_t>> seen;
  Result result;
  int64_t exact = 0, tokens = 0;
  for (const TraceRequest& request : trace) {
    const int32_t expected = naive_hit(seen, request.prompt);
    exact += expected;
    tokens += static_cast<int64_t>(request.prompt.size());
    TestStream s;
    s.sequence = cache.attach(cache.make_prompt(request.prompt));
    result.same &= s.sequence.length() == expected;
    EXPECT_LE(s.sequence.length(), expected) << "a hit that nobody computed";
    s.tokens = request.prompt;
    s.tokens.insert(s.tokens.end(), request.answer.begin(), request.answer.end());
    EXPECT_TRUE(test_run(cache, store, groups, s, 256));
    seen.push_back(s.tokens);
  }
  cache.check_invariants();
  result.stats = cache.stats();
  result.rate = static_cast<double>(result.stats.hit_tokens) / static_cast<double>(tokens);
  result.exact = static_cast<double>(exact) / static_cast<double>(tokens);
  return result;
}

void print(const char* what, const Result& result) {
  std::printf("%-44s token hit rate %.1f%%, exact simulation without end of memory %.1f%%\n", what,
              100 * result.rate, 100 * result.exact);
}

// Distinct blocks: about 21,000 tokens of chat are 1,300 blocks; of shared prompts 1,900.
const std::vector<GroupOptions> kPlenty = {{0, 8000, kTestBlockBytes}}, kTight = {{0, 400, kTestBlockBytes}};
// As gpt-oss: half the layers see 128 tokens back.
const std::vector<GroupOptions> kWindowPlenty = {{128, 8000, kTestBlockBytes}, {0, 8000, kTestBlockBytes}},
                                kWindowTight = {{128, 300, kTestBlockBytes}, {0, 400, kTestBlockBytes}};

TEST(Trace, ChatIsFoundExactlyAndMostOfItWithLittleMemory) {
  const auto trace = make_trace(ChatTrace{});
  const Result plenty = replay(trace, kPlenty, Eviction::kAdaptive);
  print("chat, memory without end", plenty);
  EXPECT_TRUE(plenty.same);
  EXPECT_GT(plenty.rate, 0.8);
  const Result tight = replay(trace, kTight, Eviction::kAdaptive);
  print("chat, memory for 400 blocks", tight);
  EXPECT_GT(tight.rate, 0.8);
  EXPECT_GT(tight.stats.main.evictions, 0u);
}

TEST(Trace, SharedPromptIsFoundExactlyAndMostOfItWithLittleMemory) {
  const auto trace = make_trace(SharedPromptTrace{});
  const Result plenty = replay(trace, kPlenty, Eviction::kAdaptive);
  print("shared prompts, memory without end", plenty);
  EXPECT_TRUE(plenty.same);
  EXPECT_GT(plenty.rate, 0.8);
  const Result tight = replay(trace, kTight, Eviction::kAdaptive);
  print("shared prompts, memory for 400 blocks", tight);
  EXPECT_GT(tight.rate, 0.8);
  EXPECT_GT(tight.stats.main.evictions, 0u);
}

TEST(Trace, WindowLayersResumeWhereTailsWereKept) {
  for (const bool tight : {false, true}) {
    const auto& groups = tight ? kWindowTight : kWindowPlenty;
    const Result chat = replay(make_trace(ChatTrace{}), groups, Eviction::kAdaptive);
    print(tight ? "chat, window 128, little memory" : "chat, window 128", chat);
    EXPECT_GT(chat.rate, 0.8);
    const Result shared = replay(make_trace(SharedPromptTrace{}), groups, Eviction::kAdaptive);
    print(tight ? "shared prompts, window 128, little memory" : "shared prompts, window 128", shared);
    EXPECT_GT(shared.rate, 0.8);
  }
}

TEST(Trace, IsTheSameForTheSameSeed) {
  const auto a = make_trace(ChatTrace{.seed = 5}), b = make_trace(ChatTrace{.seed = 5}),
             c = make_trace(ChatTrace{.seed = 6});
  ASSERT_EQ(a.size(), 160u);
  EXPECT_EQ(a[77].prompt, b[77].prompt);
  EXPECT_NE(a[77].prompt, c[77].prompt);
}

}  // namespace
}  // namespace millrace::kv
