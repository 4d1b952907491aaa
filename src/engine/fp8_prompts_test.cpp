// FP8 prompts: the same request gives the same bits whatever runs beside it, however its prompt is cut,
// whether its prefix is found and in which tier, and when it had to give way; prefixes are found from turn to
// turn; and blocks that were computed otherwise are not. On the reference device, and those that
// MILLRACE_TEST_DEVICES names.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "base/error.h"
#include "engine/random_schedules.h"

namespace millrace::test {
namespace {

std::vector<std::string> devices() {
  std::vector<std::string> names = {"reference"};
  const char* variable = std::getenv("MILLRACE_TEST_DEVICES");
  std::istringstream list(variable != nullptr ? variable : "");
  for (std::string device; std::getline(list, device, ',');) {
    if (device.starts_with("cuda")) names.push_back(device);
  }
  return names;
}

EngineOptions options_on(const std::string& device) {
  EngineOptions options;
  options.model = kLlamaModel;
  options.device = device;
  options.compute = "fp8";
  options.context = kContext;
  options.kv_tokens = 1024;
  return options;
}

std::vector<int32_t> some_tokens(int count, int from = 3) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(from + i * 37 % (kVocab - from));
  return tokens;
}

std::vector<float> logits_of(const EngineOptions& options, std::span<const int32_t> prompt,
                             std::span<const int32_t> then) {
  const auto runtime = Runtime::open(options);
  kv::Sequence sequence = runtime->make_sequence();
  std::span<const float> logits = runtime->prefill(sequence, prompt);
  for (const int32_t token : then) {
    const StepInput input{&sequence, {&token, 1}};
    logits = runtime->step({&input, 1});
  }
  return {logits.begin(), logits.end()};
}

double distance(std::span<const float> a, std::span<const float> b) {  // of the logits' spread
  double squares = 0, all = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += std::pow(a[i] - b[i], 2);
    all += std::pow(b[i], 2);
  }
  return std::sqrt(squares / all);
}

TEST(Fp8Prompts, RandomSchedules) {
  constexpr int kSchedules = 6;  // of each engine; fewer under a sanitizer
  namespace fs = std::filesystem;
  const fs::path directory = fs::path(testing::TempDir()) / fmt::format("fp8_prompts_kv_{}", ::getpid());
  for (const std::string& device : devices()) {
    fs::remove_all(directory);
    const Catalogue& catalogue = catalogue_of(kLlamaModel, device, "", "fp8");
    Counts counts;
    Random random(17);
    const int schedules = schedules_wanted(kSchedules);
    for (int e = 0; e < 8; ++e) {
      EngineOptions options = random_options(random, kLlamaModel);
      options.device = device;
      options.compute = "fp8";
      if (options.prefix_cache && random.chance(40)) options.kv_dir = directory.string();
      Harness h(options, random_pool(random, 1));
      for (int s = 0; s < schedules; ++s) {
        run_schedule(h, catalogue, random, counts);
        if (testing::Test::HasFatalFailure()) FAIL() << device << " engine " << e << " schedule " << s;
      }
      counts.hits += h.runtime->cache().stats().hit_tokens;
    }
    fs::remove_all(directory);
    std::printf(
        "[  figure  ] %s fp8 prompts: %lu schedules, %lu samples compared, %lu recomputations, %lu tokens "
        "found\n",
        device.c_str(), counts.schedules, counts.finished, counts.recomputes, counts.hits);
    if (schedules < kSchedules) continue;  // too few to take every path
    EXPECT_GT(counts.hits, 100u);
    EXPECT_GT(counts.recomputes + counts.swaps, 0u);
    EXPECT_GT(counts.forked, 0u);
  }
}

// The next turn's prompt begins with the last one's, whose blocks are found; the reply, which was not
// computed as a prompt, is computed as one.
TEST(Fp8Prompts, TheNextTurnFindsThePromptAndNotTheReply) {
  for (const std::string& device : devices()) {
    Harness h(options_on(device));
    const std::vector<int32_t> prompt = some_tokens(40);
    h.submit(greedy_request(prompt, 24));
    h.run();
    std::vector<int32_t> next = prompt;
    next.insert(next.end(), h.answers[0][0].tokens.begin(), h.answers[0][0].tokens.end());
    next.push_back(7);
    h.submit(greedy_request(next, 8));
    h.submit(greedy_request(next, 8));
    h.run();
    EXPECT_EQ(h.answers[1][0].usage.cached_tokens, 40) << device;
    EXPECT_EQ(h.answers[1][0].tokens,
              run_alone(kLlamaModel, greedy_request(next, 8), 1, device, "", "fp8")[0].tokens);
    h.submit(greedy_request(next, 8));
    h.run();
    EXPECT_EQ(h.answers[3][0].usage.cached_tokens, 64)
        << device;  // all but the last: a whole prompt is known
    EXPECT_EQ(h.answers[3][0].tokens, h.answers[1][0].tokens);
  }
}

TEST(Fp8Prompts, BlocksOnDiskAreFoundByTheirKindOnly) {
  namespace fs = std::filesystem;
  const fs::path directory = fs::path(testing::TempDir()) / fmt::format("fp8_names_kv_{}", ::getpid());
  fs::remove_all(directory);
  for (const auto& [compute, found] : {std::pair{"fp8", 0}, {"full", 0}, {"fp8", 49}, {"full", 49}}) {
    EngineOptions options = options_on("reference");
    options.compute = compute;
    options.kv_dir = directory.string();
    Harness h(options);
    h.submit(greedy_request(some_tokens(50), 2));
    h.run();
    // What a file holds is whole blocks.
    EXPECT_EQ(h.answers[0][0].usage.cached_tokens, found / kBlockTokens * kBlockTokens) << compute;
    h.runtime->cache().flush();
  }
  fs::remove_all(directory);
}

// Near to the full products, and not the same; what is decoded behind them is full, as after a whole prompt
// that was cut.
TEST(Fp8Prompts, AreNearToFullOnesAndOtherDevicesToTheReference) {
  const std::vector<int32_t> prompt = some_tokens(70), then = some_tokens(3, 9);
  EngineOptions full = options_on("reference");
  full.compute = "full";
  const std::vector<float> exact = logits_of(full, prompt, then),
                           want = logits_of(options_on("reference"), prompt, then);
  const double rounded = distance(want, exact);
  EXPECT_GT(rounded, 1e-4);
  EXPECT_LT(rounded, 0.1);
  for (const std::string& device : devices()) {
    EngineOptions options = options_on(device);
    const std::vector<float> whole = logits_of(options, prompt, then);
    options.step_tokens = 16;
    EXPECT_EQ(logits_of(options, prompt, then), whole) << device << ", in pieces of 16";
    // On a GPU activations of decoding are bf16: further away than FP8's own noise would not be rounding.
    const double apart = distance(whole, want);
    EXPECT_LT(apart, 0.5 * rounded + 0.02) << device;
    std::printf("[  figure  ] %s fp8 prompts: %.4f from full, %.4f from the reference's\n", device.c_str(),
                distance(whole, exact), apart);
  }
}

std::string refused_with(const EngineOptions& options) {
  try {
    Runtime::open(options);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

void expect_refused(const EngineOptions& options, const std::string& words) {
  const std::string message = refused_with(options);
  EXPECT_NE(message.find(words), std::string::npos) << message;
}

TEST(Fp8Prompts, WhatIsNotDoneIsRefusedInALine) {
  EngineOptions options = options_on("cpu");
  expect_refused(options, "compute: found fp8 on device cpu, expected full");
  options.device = "reference";
  options.model = kWindowModel;
  expect_refused(options, "a model with experts, expected one without");
  options.model = kStateModel;
  expect_refused(options, "expected one without");
  options.model = kLlamaModel;
  options.device = "reference+reference";
  expect_refused(options, "compute: found fp8 with device, expected it alone");
  options.device = "reference";
  options.compute = "fp4";
  expect_refused(options, "compute: found 'fp4', expected full or fp8");
  options.compute = "fp8";
  options.adapters = {"one=tests/golden/adapters/llama3/peft"};
  expect_refused(options, "compute: found fp8 with adapters, expected it alone");
}

}  // namespace
}  // namespace millrace::test
