// The sampler against exact distributions (chi-square, fixed seeds), against the formulas of Hugging Face for
// penalties, and against log-softmax in double; its answers pinned so that they stay the same everywhere.
#include "sample/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/sampling_math.h"
#include "sample/select.h"
#include "sample/token_softmax.h"

namespace millrace {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Bell-shaped logits with repeatable values, independent of the sampler's own generator.
std::vector<float> make_logits(size_t n, uint32_t seed, float spread = 2.0f) {
  std::vector<float> logits(n);
  uint32_t state = seed * 2654435761u + 1;
  for (float& x : logits) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
      state = state * 1664525u + 1013904223u;
      sum += static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
    }
    x = sum * spread * 1.7f;
  }
  return logits;
}

std::vector<double> exact_softmax(const std::vector<float>& logits, double temperature) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  for (const float x : logits) p.push_back(std::exp((static_cast<double>(x) - top) / temperature));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

// What top-k, top-p and min-p leave of p, by sorting.
std::vector<double> exact_cut(std::vector<double> p, int top_k, double top_p, double min_p) {
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  if (top_k > 0) order.resize(std::min<size_t>(order.size(), static_cast<size_t>(top_k)));
  double kept = 0.0;
  for (const size_t i : order) kept += p[i];
  double sum = 0.0;
  std::vector<double> out(p.size(), 0.0);
  for (const size_t i : order) {
    if (sum >= top_p * kept) break;
    sum += p[i];
    if (p[i] >= min_p * p[order[0]]) out[i] = p[i];
  }
  const double total = std::accumulate(out.begin(), out.end(), 0.0);
  for (double& x : out) x /= total;
  return out;
}

// Draws from `params` and compares with the distribution `expected`: nothing outside its support, and a
// chi-square statistic within 5 standard deviations of its mean.
void expect_distribution(SamplingParams params, const std::vector<float>& logits,
                         const std::vector<double>& expected) {
  constexpr int kDraws = 20000;
  params.seed = 7;
  Sampler sampler(params, static_cast<int32_t>(logits.size()));
  std::vector<int> counts(logits.size(), 0);
  for (int i = 0; i < kDraws; ++i) ++counts[static_cast<size_t>(sampler.sample(logits).token)];
  double chi = 0.0, pooled_expected = 0.0, pooled_found = 0.0;
  int cells = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (expected[i] == 0.0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " was cut";
      continue;
    }
    const double want = expected[i] * kDraws;
    if (want < 10.0) {  // too rare for the statistic: pooled
      pooled_expected += want;
      pooled_found += counts[i];
      continue;
    }
    chi += (counts[i] - want) * (counts[i] - want) / want;
    ++cells;
  }
  if (pooled_expected >= 10.0) {
    chi += (pooled_found - pooled_expected) * (pooled_found - pooled_expected) / pooled_expected;
    ++cells;
  }
  const double freedom = cells - 1;
  EXPECT_LT(chi, freedom + 5.0 * std::sqrt(2.0 * freedom) + 5.0) << cells << " cells";
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowestOfEquals) {
  SamplingParams params;
  params.temperature = 0.0f;
  Sampler sampler(params, 40);
  std::vector<float> logits(40, -3.0f);
  logits[17] = logits[33] = 2.5f;
  EXPECT_EQ(sampler.sample(logits).token, 17);
  logits[39] = 2.75f;
  EXPECT_EQ(sampler.sample(logits).token, 39);
  std::vector<float> zeros(40, -0.0f);
  zeros[5] = 0.0f;  // equal to the others
  EXPECT_EQ(sampler.sample(zeros).token, 0);
}

TEST(Sampler, DrawsTheExactDistribution) {
  const std::vector<float> logits = make_logits(700, 1);
  expect_distribution({}, logits, exact_softmax(logits, 1.0));
  SamplingParams hot;
  hot.temperature = 2.5f;
  expect_distribution(hot, logits, exact_softmax(logits, 2.5));
  SamplingParams cold;
  cold.temperature = 0.25f;
  expect_distribution(cold, logits, exact_softmax(logits, 0.25));
}

TEST(Sampler, CutsTopKTopPMinP) {
  const std::vector<float> logits = make_logits(700, 2);
  const std::vector<double> p = exact_softmax(logits, 0.8);
  SamplingParams params;
  params.temperature = 0.8f;
  params.top_k = 40;
  expect_distribution(params, logits, exact_cut(p, 40, 1.0, 0.0));
  params.top_k = 0;
  params.top_p = 0.6f;
  expect_distribution(params, logits, exact_cut(p, 0, 0.6f, 0.0));
  params.top_p = 1.0f;
  params.min_p = 0.05f;
  expect_distribution(params, logits, exact_cut(p, 0, 1.0, 0.05f));
  params.top_k = 100;
  params.top_p = 0.7f;
  params.min_p = 0.2f;
  expect_distribution(params, logits, exact_cut(p, 100, 0.7f, 0.2f));
}

TEST(Sampler, CutsAmongEqualsKeepTheLowestIds) {
  SamplingParams params;
  params.top_k = 3;
  const std::vector<float> flat(300, 1.0f);
  std::vector<double> expected(300, 0.0);
  for (size_t i = 0; i < 3; ++i) expected[i] = 1.0 / 3;
  expect_distribution(params, flat, expected);
  params.top_k = 0;
  params.top_p = 0.01f;  // 3 of 300
  expect_distribution(params, flat, expected);
}

TEST(Sampler, PenaltiesFollowTheFormulas) {
  // Greedy on top of each penalty: the winner tells whether the arithmetic is right.
  const std::vector<float> logits = {4.0f, 2.1f, -1.0f, 1.0f};
  const auto winner = [&](SamplingParams params, std::vector<int32_t> prompt, std::vector<float> scores) {
    params.temperature = 0.0f;
    params.logprobs = 0;
    Sampler sampler(params, 4);
    sampler.add_prompt(prompt);
    return sampler.sample(scores).token;
  };
  SamplingParams repetition;
  repetition.repetition_penalty = 2.0f;  // 4 / 2 < 2.1
  EXPECT_EQ(winner(repetition, {0, 0}, logits), 1);
  repetition.repetition_penalty = 1.9f;  // 4 / 1.9 > 2.1: once, however often the token was seen
  EXPECT_EQ(winner(repetition, {0, 0}, logits), 0);
  repetition.repetition_penalty = 2.0f;  // -1 * 2 < -1.5
  EXPECT_EQ(winner(repetition, {2}, {-3.0f, -1.5f, -1.0f, -9.0f}), 1);

  SamplingParams presence;
  presence.presence_penalty = 2.0f;
  EXPECT_EQ(winner(presence, {0}, logits), 0) << "the prompt does not count";
  presence.temperature = 0.0f;
  Sampler sampler(presence, 4);
  EXPECT_EQ(sampler.sample(logits).token, 0);
  EXPECT_EQ(sampler.sample(logits).token, 1) << "4 - 2 < 2.1";
  EXPECT_EQ(sampler.sample(logits).token, 0) << "2.1 - 2 < 2, and presence is subtracted once";

  SamplingParams frequency;
  frequency.temperature = 0.0f;
  frequency.frequency_penalty = 0.7f;
  Sampler counting(frequency, 4);
  std::vector<int32_t> picked;
  for (int i = 0; i < 5; ++i) picked.push_back(counting.sample(logits).token);
  // 4, 3.3, 2.6, 1.9 against 2.1, then 2.1 - 0.7 against 1.9.
  EXPECT_EQ(picked, (std::vector<int32_t>{0, 0, 0, 1, 0}));
}

TEST(Sampler, BiasAddsToLogits) {
  SamplingParams params;
  params.temperature = 0.0f;
  params.logit_bias = {{2, 5.5f}, {0, -1.0f}};
  Sampler sampler(params, 3);
  EXPECT_EQ(sampler.sample(std::vector<float>{4.0f, 2.0f, -1.0f}).token, 2);
  EXPECT_EQ(sampler.sample(std::vector<float>{4.0f, 3.5f, -9.0f}).token, 1);
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  const std::vector<float> logits = make_logits(5000, 3, 6.0f);
  const std::vector<double> p = exact_softmax(logits, 1.0);
  SamplingParams params;
  params.temperature = 3.0f;
  params.top_k = 50;
  params.logprobs = 7;
  params.seed = 1;
  Sampler sampler(params, 5000);
  const SampledToken sampled = sampler.sample(logits);
  EXPECT_NEAR(sampled.logprob, std::log(p[static_cast<size_t>(sampled.token)]), 1e-6);
  ASSERT_EQ(sampled.top.size(), 7u);
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(sampled.top[i].first, static_cast<int32_t>(order[i]));
    EXPECT_NEAR(sampled.top[i].second, std::log(p[order[i]]), 1e-6);
  }
}

TEST(Sampler, SameSeedSameTokens) {
  const std::vector<float> logits = make_logits(3000, 4);
  const auto tokens = [&](std::optional<uint64_t> seed) {
    SamplingParams params;
    params.top_p = 0.95f;
    params.seed = seed;
    Sampler sampler(params, 3000);
    std::vector<int32_t> out;
    for (int i = 0; i < 8; ++i) out.push_back(sampler.sample(logits).token);
    return out;
  };
  EXPECT_EQ(tokens(42), tokens(42));
  EXPECT_NE(tokens(42), tokens(43));
  EXPECT_NE(tokens(std::nullopt), tokens(std::nullopt));
  // Pinned: another machine, compiler or instruction set must give these too.
  EXPECT_EQ(tokens(42), (std::vector<int32_t>{1003, 2857, 1477, 170, 2129, 171, 563, 2261}));
}

TEST(Sampler, DamagedLogitsAreAnErrorOrLeftOut) {
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingParams params;
    params.temperature = temperature;
    params.top_p = 0.9f;
    params.top_k = 20;
    params.min_p = 0.01f;
    params.logprobs = 3;
    Sampler sampler(params, 50);
    EXPECT_THROW(sampler.sample(std::vector<float>(50, kNan)), Error);
    EXPECT_THROW(sampler.sample(std::vector<float>(50, -kInf)), Error);
    EXPECT_THROW(sampler.sample(std::vector<float>(49, 0.0f)), Error);
    std::vector<float> one(50, kNan);
    one[31] = -1e30f;
    EXPECT_EQ(sampler.sample(one).token, 31);
    std::vector<float> infinite = make_logits(50, 5);
    infinite[3] = kInf;
    infinite[4] = kNan;
    const SampledToken sampled = sampler.sample(infinite);
    EXPECT_EQ(sampled.token, 3);
    EXPECT_EQ(sampled.logprob, 0.0);
    EXPECT_EQ(sampled.top[0].second, 0.0);
  }
}

TEST(Sampler, RejectsParametersByName) {
  const auto message = [](auto change) -> std::string {
    SamplingParams params;
    change(params);
    try {
      Sampler sampler(params, 100);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([](SamplingParams&) {}), "");
  EXPECT_NE(message([](SamplingParams& p) { p.temperature = -1.0f; }).find("temperature is -1"),
            std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.temperature = kNan; }).find("temperature"), std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.top_k = -3; }).find("top_k is -3"), std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.top_p = 0.0f; }).find("top_p"), std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.top_p = 1.5f; }).find("top_p"), std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.min_p = 2.0f; }).find("min_p"), std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.repetition_penalty = 0.0f; }).find("repetition"),
            std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.logit_bias[100] = 1.0f; }).find("token 100"),
            std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.logit_bias[1] = kInf; }).find("token 1 is inf"),
            std::string::npos);
  EXPECT_NE(message([](SamplingParams& p) { p.logprobs = -1; }).find("logprobs"), std::string::npos);
}

TEST(Softmax, ExponentialIsAccurate) {
  using sampling::exp_nonpositive;
  std::vector<float> weights;
  for (double x = 0.0; x > -86.9; x -= 0.00137) {
    const double exact = std::exp(static_cast<double>(static_cast<float>(x)));
    EXPECT_NEAR(exp_nonpositive(static_cast<float>(x)) / exact, 1.0, 3e-7) << x;
    const std::vector<float> four(4, static_cast<float>(x));  // those of the vectors are the same bits
    softmax_weights(four, 0.0f, 1.0f, weights);
    EXPECT_EQ(weights[3], exp_nonpositive(four[3])) << x;
  }
  EXPECT_EQ(exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(exp_nonpositive(-1000.0f), 0.0f);
  EXPECT_EQ(exp_nonpositive(-kInf), 0.0f);
  EXPECT_EQ(exp_nonpositive(kNan), 0.0f);
}

TEST(Softmax, UnitsAddUpInAnyOrder) {
  std::vector<float> weights;
  softmax_weights(make_logits(20001, 9, 9.0f), 30.0f, 1.0f, weights);
  weights[5] = 1.0f;
  uint64_t sum = 0;
  for (size_t i = weights.size(); i-- > 0;) sum += sampling::units_of(weights[i]);
  EXPECT_EQ(sum_units(weights), sum);
  EXPECT_EQ(sampling::units_of(1.0f), uint64_t{1} << 40);
  EXPECT_EQ(sampling::units_of(0x1p-41f), 0u);  // halves go to even
  EXPECT_EQ(sampling::units_of(0x1.8p-40f), 2u);
  EXPECT_EQ(sampling::drawn_unit(0.0, 7), 0u);
  EXPECT_EQ(sampling::drawn_unit(0.9999999999999999, uint64_t{1} << 58), (uint64_t{1} << 58) - 32);
  EXPECT_EQ(sampling::units_of_mass(1e-30f, 5), 1u);
}

// What a device that picks tokens is told gives what sample() gives.
TEST(Sampler, AcceptsWhatWasPickedElsewhere) {
  const std::vector<float> logits = make_logits(900, 6);
  SamplingParams params;
  params.seed = 3;
  params.presence_penalty = 0.5f;
  Sampler here(params, 900), elsewhere(params, 900);
  for (int i = 0; i < 20; ++i) {
    const double uniform = elsewhere.uniform();
    EXPECT_EQ(here.uniform(), uniform);
    if (i > 0) {
      EXPECT_EQ(elsewhere.counted().size(), here.counted().size());
    }
    const double next = here.uniform(1);
    elsewhere.accept(here.sample(logits).token);
    EXPECT_EQ(elsewhere.uniform(), next);
  }
}

TEST(Select, CutsAgreeWithSorting) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::vector<float> weights;
    softmax_weights(make_logits(1000, seed, 3.0f), 12.0f, 1.0f, weights);
    for (size_t i = 0; i < 300; ++i) weights[i] = weights[i + 300];  // ties
    const int64_t k = 1 + static_cast<int64_t>(seed) * 17;
    std::vector<size_t> order(weights.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] > weights[b]; });
    const Cut cut = cut_to_count(weights, k);
    EXPECT_EQ(cut.id, static_cast<int32_t>(order[static_cast<size_t>(k - 1)]));
    uint64_t mass = 1;
    for (int64_t i = 0; i + 1 < k; ++i) mass += sampling::units_of(weights[order[static_cast<size_t>(i)]]);
    EXPECT_EQ(cut_to_mass(weights, sum_units(weights), mass).id, cut.id);
  }
}

}  // namespace
}  // namespace millrace
