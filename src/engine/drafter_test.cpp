// Drafts: what is proposed, how many, and that the tokens that come out are the model's own.
#include "engine/drafter.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "engine/test_harness.h"

namespace millrace::test {
namespace {

TEST(LookupDrafter, ContinuesWhatCameBefore) {
  LookupDrafter drafter;
  drafter.reserve(64);
  Buffer<int32_t> drafts;
  const std::vector<int32_t> text = {1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3};
  EXPECT_EQ(drafter.look(text), LookupDrafter::k2Agree);
  drafter.take(text, 4, drafts);
  EXPECT_EQ(std::vector<int32_t>(drafts.begin(), drafts.end()), (std::vector<int32_t>{4, 5, 6, 7}));
  const std::vector<int32_t> periodic = {1, 2, 3, 1, 2, 3, 1, 2};
  LookupDrafter other;
  other.reserve(64);
  EXPECT_EQ(other.look(periodic), LookupDrafter::k3Agree);
  other.take(periodic, 7, drafts);
  EXPECT_EQ(std::vector<int32_t>(drafts.begin(), drafts.end()), (std::vector<int32_t>{3, 1, 2, 3, 1, 2, 3}))
      << "a repetition repeats";
  LookupDrafter none;
  none.reserve(64);
  const std::vector<int32_t> fresh = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(none.look(fresh), LookupDrafter::kNone);
  none.take(fresh, 4, drafts);
  EXPECT_TRUE(drafts.empty());
}

TEST(LookupDrafter, PrefersTheLongerAndTheLaterEvidence) {
  LookupDrafter drafter;
  drafter.reserve(64);
  Buffer<int32_t> drafts;
  // "3 4" came last before 9; "2 3 4" before 7.
  const std::vector<int32_t> text = {1, 2, 3, 4, 7, 8, 3, 4, 9, 1, 2, 3, 4};
  EXPECT_EQ(drafter.look(text), LookupDrafter::k3Agree);
  drafter.take(text, 1, drafts);
  ASSERT_EQ(drafts.size(), 1u);
  EXPECT_EQ(drafts[0], 7);
}

// A copy of 60 tokens with one changed: behind it the copy goes on at once, and what speaks for it grows.
TEST(LookupDrafter, ResumesACopyBehindAChangedToken) {
  LookupDrafter drafter;
  drafter.reserve(200);
  Buffer<int32_t> drafts;
  std::vector<int32_t> text;
  for (int32_t i = 0; i < 60; ++i) text.push_back(100 + i);
  for (int32_t i = 0; i < 30; ++i) {
    drafter.look(text);
    text.push_back(100 + i);
  }
  EXPECT_EQ(drafter.look(text), LookupDrafter::k24Agree);
  text.push_back(7);  // instead of 130
  EXPECT_EQ(drafter.look(text), LookupDrafter::kResumed);
  drafter.take(text, 3, drafts);
  EXPECT_EQ(std::vector<int32_t>(drafts.begin(), drafts.end()), (std::vector<int32_t>{131, 132, 133}));
  const LookupDrafter::Evidence then[] = {LookupDrafter::kResumed, LookupDrafter::kResumed,
                                          LookupDrafter::k3Agree};
  for (int32_t i = 0; i < 3; ++i) {
    text.push_back(131 + i);
    EXPECT_EQ(drafter.look(text), then[i]) << i;
  }
  for (int32_t i = 3; i < 12; ++i) {
    text.push_back(131 + i);
    drafter.look(text);
  }
  EXPECT_EQ(drafter.look(text), LookupDrafter::k12Agree);
}

TEST(DraftLength, FollowsAcceptanceAndCost) {
  DraftLength good, bad;
  for (int i = 0; i < 50; ++i) good.add(4, 4);
  for (int i = 0; i < 50; ++i) bad.add(4, 0);
  EXPECT_EQ(good.best(0.1, 0.0, 8), 8);
  EXPECT_LE(good.best(1.5, 0.0, 8), 2) << "a row that costs more than a step";
  EXPECT_EQ(bad.best(0.3, 0.0, 8), 0);
  int tried = 0;
  for (int i = 0; i < 100; ++i) tried += bad.best(0.3, 0.0, 8) > 0;
  EXPECT_GT(tried, 0) << "text changes";
  EXPECT_LT(tried, 10);
  EXPECT_GT(good.acceptance(), 0.95);
}

TEST(StepCost, FindsTheLine) {
  StepCost cost;
  for (int i = 0; i < 100; ++i) cost.add(1 + i % 9, 0.008 + 0.003 * (1 + i % 9));
  EXPECT_NEAR(cost.row_s(), 0.003, 1e-6);
  EXPECT_NEAR(cost.step_s(1), 0.011, 1e-6);
}

// The rejection rule: a draft x is kept with probability p(x); where it is not, the others come in proportion
// to their own probabilities. A fixed seed per trial; bounds of five standard deviations.
TEST(Speculation, KeepsTheDistributionOfTheModel) {
  const std::vector<float> logits = {1.0f, 0.2f, -0.5f, 2.0f, 0.0f, -1.0f};
  double total = 0;
  std::vector<double> p;
  for (const float l : logits) total += std::exp(static_cast<double>(l));
  for (const float l : logits) p.push_back(std::exp(static_cast<double>(l)) / total);
  constexpr int kTrials = 40000;
  for (const int32_t draft : {0, 3, 5}) {
    std::vector<int> seen(logits.size(), 0);
    int kept = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      Sampler sampler({.temperature = 1.0f, .seed = static_cast<uint64_t>(trial)},
                      static_cast<int32_t>(logits.size()));
      const int32_t token = sampler.sample(logits).token;  // what Loop::pick does at each draft
      kept += token == draft;
      ++seen[static_cast<size_t>(token)];
    }
    const auto bound = [&](double q) { return 5 * std::sqrt(q * (1 - q) * kTrials); };
    EXPECT_NEAR(kept, p[static_cast<size_t>(draft)] * kTrials, bound(p[static_cast<size_t>(draft)]));
    for (size_t t = 0; t < p.size(); ++t) EXPECT_NEAR(seen[t], p[t] * kTrials, bound(p[t])) << t;
  }
}

Request ask_seeded(int32_t seed, float temperature) {
  Request r;
  for (int32_t i = 0; i < 12; ++i) r.tokens.push_back(3 + (seed * 17 + i * 5) % 200);
  r.max_tokens = 40;
  r.ignore_end = true;
  r.sampling = {.temperature = temperature, .seed = static_cast<uint64_t>(seed)};
  return r;
}

struct DraftRun {
  uint64_t drafted = 0, accepted = 0;
};

DraftRun run_with_drafts_of(const std::string& draft_model) {
  EngineOptions options = small_options();
  options.max_running = 4;
  options.speculation = Speculation::kDraft;
  options.draft_model = draft_model;
  options.max_draft = 4;
  auto drafter = std::make_unique<ModelDrafter>(
      Runtime::open({.model = draft_model, .threads = 1, .context = 128}, {.sequences = 4}),
      Runtime::open({.model = kLlamaModel})->config().vocab);
  Harness h(options, {}, std::move(drafter));
  std::vector<Request> requests;
  for (int32_t i = 0; i < 6; ++i) requests.push_back(ask_seeded(i, i % 2 == 0 ? 0.0f : 0.9f));
  for (const Request& r : requests) h.submit(r);
  h.run();
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(h.answers[i][0].tokens, run_alone(kLlamaModel, requests[i])[0].tokens) << draft_model;
  }
  return {h.recorder->drafted.load(), h.recorder->accepted.load()};
}

TEST(Speculation, ADraftModelChangesSpeedAndNotTokens) {
  // The same weights in another file: most drafts are right, greedy or sampled. (A draft costs as much as a
  // token here, so few are asked for; how few, the clock says.)
  const DraftRun same = run_with_drafts_of("tests/golden/models/llama3/hf");
  EXPECT_GT(same.drafted, 0u);
  EXPECT_GT(static_cast<double>(same.accepted), 0.5 * static_cast<double>(same.drafted));
  const DraftRun foreign = run_with_drafts_of("tests/golden/models/quant-mix-1/model.gguf");
  EXPECT_GT(foreign.drafted, foreign.accepted);
  const DraftRun self = run_with_drafts_of(kLlamaModel);
  EXPECT_GT(self.drafted, 0u);
  EXPECT_EQ(self.accepted, self.drafted);
}

TEST(Speculation, ADraftModelOfAnotherVocabularyIsRefused) {
  EXPECT_THROW(ModelDrafter(Runtime::open({.model = kLlamaModel, .context = 64}), 7), Error);
}

}  // namespace
}  // namespace millrace::test
