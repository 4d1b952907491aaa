// Picking tokens: the sampler against the plainest way to write its rule, over thousands of rows; and an
// engine whose device samples against one that does it here.
#include <gtest/gtest.h>

#include <random>

#include "base/error.h"
#include "engine/naive_sampling.h"
#include "engine/sampling_cases.h"
#include "engine/test_harness.h"
#include "sample/token_softmax.h"

namespace millrace::test {
namespace {

TEST(Pick, TheSamplerFollowsTheRule) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    const SamplingCase c(seed, 40 + static_cast<int32_t>(seed % 700));
    const NaiveSample want = naive_sample(c.row, c.logits);
    Sampler sampler = c.sampler;
    ASSERT_EQ(sampler.uniform(), c.row.uniform);
    if (want.token < 0) {
      if (want.token == SampledRow::kNothing) {
        EXPECT_THROW(sampler.sample(c.logits, c.allowed), Error);
      }
      continue;
    }
    const SampledToken got = sampler.sample(c.logits, c.allowed);
    ASSERT_EQ(got.token, want.token) << "seed " << seed;
    if (c.row.logprobs < 0) continue;
    const double log_sum = log_of_units(want.largest, want.units);
    ASSERT_EQ(got.logprob, log_softmax_of(want.chosen, log_sum, want.units)) << "seed " << seed;
    ASSERT_EQ(got.top.size(), want.top.size()) << "seed " << seed;
    for (size_t i = 0; i < want.top.size(); ++i) {
      ASSERT_EQ(got.top[i].first, want.top[i].token);
      ASSERT_EQ(got.top[i].second, log_softmax_of(want.top[i].logit, log_sum, want.units));
    }
  }
}

// Only tokens whose id has the remainder that comes next.
class Remainders final : public TokenConstraint {
 public:
  std::unique_ptr<TokenConstraint> clone() const override { return std::make_unique<Remainders>(*this); }
  bool allowed(std::span<uint64_t> mask) override {
    if (next_ == 2) return false;  // all are
    for (size_t t = next_; t < 250; t += 3) mask[t / 64] |= uint64_t{1} << (t % 64);
    return true;
  }
  void accept(int32_t) override { next_ = (next_ + 1) % 3; }

 private:
  size_t next_ = 0;
};

std::vector<Request> requests_of_every_kind() {
  std::vector<Request> requests;
  for (int i = 0; i < 14; ++i) {
    Request r;
    r.tokens = {5 + i, 17, 40 + i, 9, 17};
    r.max_tokens = 20 + i;
    r.ignore_end = true;
    r.sampling.seed = static_cast<uint64_t>(i);
    r.sampling.temperature = i % 4 == 0 ? 0.0f : 1.1f;
    if (i % 3 == 1) r.sampling.top_p = 0.8f;
    if (i % 5 == 2) r.sampling.top_k = 30;
    if (i % 7 == 3) r.sampling.min_p = 0.02f;
    if (i == 4 || i == 5) r.sampling.frequency_penalty = 0.4f;
    if (i == 6) r.sampling.logit_bias = {{7, 3.0f}, {100, -2.0f}};
    if (i == 7) r.sampling.logprobs = 0;
    if (i == 8) r.sampling.logprobs = 7;
    if (i == 9) r.sampling.logprobs = 30;  // more than the device does
    if (i == 10) r.samples = 3;
    if (i == 11 || i == 12) r.constraint = std::make_shared<Remainders>();
    requests.push_back(r);
  }
  return requests;
}

TEST(Pick, ADeviceThatSamplesGivesTheSameAnswers) {
  for (const Speculation speculation : {Speculation::kOff, Speculation::kLookup}) {
    EngineOptions options = small_options();
    options.speculation = speculation;
    SamplingExecutor* sampling = nullptr;
    Harness here(options), device(options, {}, nullptr, sampling_device(&sampling));
    for (const Request& r : requests_of_every_kind()) {
      here.submit(r);
      device.submit(r);
    }
    here.run();
    device.run();
    for (size_t i = 0; i < here.answers.size(); ++i) {
      for (size_t s = 0; s < here.answers[i].size(); ++s) {
        EXPECT_EQ(here.answers[i][s].tokens, device.answers[i][s].tokens) << "request " << i;
        EXPECT_EQ(here.answers[i][s].logprobs, device.answers[i][s].logprobs) << "request " << i;
        EXPECT_EQ(device.answers[i][s].finish, FinishReason::kMaxTokens) << device.answers[i][s].error;
      }
    }
    EXPECT_GT(sampling->rows_left, 20);
  }
}

// Whoever ends by a stop token leaves a row in the step that was launched ahead; those beside it go on.
TEST(Pick, StepsAheadSurviveEnds) {
  SamplingExecutor* sampling = nullptr;
  Harness device(small_options(), {}, nullptr, sampling_device(&sampling));
  std::vector<std::vector<Answer>> want;
  for (int i = 0; i < 6; ++i) {
    Request r;
    r.tokens = {5 + i, 17, 40 + i, 9, 17};
    r.max_tokens = 30 + i;
    r.sampling.seed = static_cast<uint64_t>(i);
    r.ignore_end = true;
    if (i == 2) r.sampling.logprobs = 3;
    Request stops = r;
    const std::vector<int32_t> all = run_alone(kLlamaModel, r)[0].tokens;
    stops.stop_tokens = {all[10 + static_cast<size_t>(i)]};
    want.push_back(run_alone(kLlamaModel, stops));
    device.submit(stops);
  }
  device.run();
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(device.answers[i][0].tokens, want[i][0].tokens);
    EXPECT_EQ(device.answers[i][0].logprobs, want[i][0].logprobs);
    EXPECT_EQ(device.answers[i][0].finish, want[i][0].finish);
  }
  EXPECT_GT(sampling->steps_ahead, 10);
  EXPECT_EQ(device.recorder->decode_tokens.load() > 0, true);
}

}  // namespace
}  // namespace millrace::test
