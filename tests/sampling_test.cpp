// Devices that pick tokens themselves, against the host's sampler: random rows with every combination of
// parameters, alone and in batches of 128; and whole answers of an engine that launches steps ahead, against
// the plainest loop. Without such a device (MILLRACE_TEST_DEVICES) a stand-in proves the test itself.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "backend/backend.h"
#include "engine/sampling_cases.h"
#include "engine/test_harness.h"
#include "golden_reader.h"
#include "sample/token_softmax.h"

namespace millrace::test {
namespace {

// The reference stands for no device.
std::vector<std::string> sampling_devices() {
  std::vector<std::string> names = golden::device_names();
  names[0] = "reference";
  return names;
}

constexpr int32_t kMaxRows = 128;

// An executor whose logits the test writes.
class Rows {
 public:
  Rows(const std::string& device, int32_t vocab) : backend_(make_backend(device, {.threads = 1})) {
    spec_.max_tokens = spec_.max_logit_rows = kMaxRows;
    spec_.max_context = kBlockTokens;
    spec_.hidden = spec_.head_dim = 32;
    spec_.heads = spec_.kv_heads = 1;
    spec_.ffn = 32;
    spec_.vocab = vocab;
    spec_.kv_type = backend_->default_kv_type();
    spec_.kv_groups = {{0, 1, kMaxRows}};
    spec_.layers = {{0, 0}};
    executor_ = backend_->make_executor(spec_);
    if (!executor_->samples()) executor_ = std::make_unique<SamplingExecutor>(std::move(executor_));
    for (int32_t r = 0; r < kMaxRows; ++r) blocks_.push_back(r);
  }

  std::span<const SampledRow> sample(std::span<const std::unique_ptr<SamplingCase>> cases) {
    const auto count = static_cast<int32_t>(cases.size());
    std::vector<int32_t> tokens(cases.size(), 0), logit_rows;
    std::vector<SequenceSlice> sequences;
    std::vector<float> logits;
    std::vector<SampleRow> rows;
    for (int32_t r = 0; r < count; ++r) {
      sequences.push_back({.first_row = r, .num_tokens = 1, .context_len = 0, .tables = {&blocks_[r]}});
      logit_rows.push_back(r);
      const SamplingCase& c = *cases[static_cast<size_t>(r)];
      logits.insert(logits.end(), c.logits.begin(), c.logits.end());
      rows.push_back(c.row);
    }
    executor_->begin(
        {.tokens = tokens, .sequences = sequences, .logit_rows = logit_rows, .sampled_rows = {}});
    executor_->write_slot(Slot::kLogits, logits);
    EXPECT_TRUE(executor_->sample(rows));
    return executor_->sampled();
  }

 private:
  std::unique_ptr<Backend> backend_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  std::vector<int32_t> blocks_;
};

void expect_as_the_sampler(const SampledRow& got, const SamplingCase& c, const std::string& what) {
  const bool nan = std::any_of(c.logits.begin(), c.logits.end(), [](float x) { return std::isnan(x); });
  if (nan) {
    EXPECT_EQ(got.token, SampledRow::kNotANumber) << what;
    return;
  }
  Sampler sampler = c.sampler;
  SampledToken want;
  try {
    want = sampler.sample(c.logits, c.allowed);
  } catch (const Error&) {
    EXPECT_EQ(got.token, SampledRow::kNothing) << what;
    return;
  }
  ASSERT_EQ(got.token, want.token) << what;
  if (c.row.logprobs < 0) return;
  const double log_sum = log_of_units(got.largest, got.units);
  ASSERT_EQ(log_softmax_of(got.chosen, log_sum, got.units), want.logprob) << what;
  ASSERT_EQ(got.top.size(), want.top.size()) << what;
  for (size_t i = 0; i < want.top.size(); ++i) {
    ASSERT_EQ(got.top[i].token, want.top[i].first) << what;
    ASSERT_EQ(log_softmax_of(got.top[i].logit, log_sum, got.units), want.top[i].second) << what;
  }
}

TEST(Sampling, DevicesPickWhatTheSamplerPicks) {
  for (const std::string& device : sampling_devices()) {
    int compared = 0;
    const bool real = device != "reference";
    for (const auto& [vocab, batches] :
         {std::pair{83, 12}, {1000, 8}, {50257, real ? 4 : 0}, {201088, real ? 2 : 0}}) {
      if (batches == 0) continue;
      Rows rows(device, vocab);
      for (int b = 0; b < batches; ++b) {
        std::vector<std::unique_ptr<SamplingCase>> cases;
        for (int r = 0; r < kMaxRows - b; ++r) {
          cases.push_back(
              std::make_unique<SamplingCase>(static_cast<uint32_t>(100003 * vocab + 1000 * b + r), vocab));
        }
        if (b == 0) {  // one that asks for nothing: the row is left
          cases[5]->row.wanted = false;
        }
        const std::span<const SampledRow> found = rows.sample(cases);
        std::vector<std::pair<int32_t, uint64_t>> first;
        for (size_t r = 0; r < cases.size(); ++r) {
          first.emplace_back(found[r].token, found[r].units);
          if (!cases[r]->row.wanted) {
            EXPECT_EQ(found[r].token, SampledRow::kLeft);
            continue;
          }
          expect_as_the_sampler(found[r], *cases[r],
                                fmt::format("{}, vocabulary {}, batch {}, row {}", device, vocab, b, r));
          if (HasFatalFailure()) return;
          ++compared;
        }
        for (size_t r = 0; r < cases.size(); r += 29) {  // alone: the same
          const SampledRow alone = rows.sample({&cases[r], 1})[0];
          EXPECT_EQ(alone.token, first[r].first);
          EXPECT_EQ(alone.units, first[r].second);
        }
      }
    }
    std::printf("[  figure  ] %s sampling: %d rows as the sampler picks\n", device.c_str(), compared);
  }
}

// Rows of the plainest kind take a way of their own.
TEST(Sampling, GreedyRows) {
  for (const std::string& device : sampling_devices()) {
    for (const int32_t vocab : {83, 50257}) {
      Rows rows(device, vocab);
      std::vector<std::unique_ptr<SamplingCase>> cases;
      for (int r = 0; r < kMaxRows; ++r) {
        cases.push_back(std::make_unique<SamplingCase>(static_cast<uint32_t>(r), vocab));
        SamplingParams params;
        params.temperature = 0.0f;
        cases.back()->sampler = Sampler(params, vocab);
        cases.back()->allowed.clear();
        cases.back()->row = {};
        cases.back()->row.wanted = true;
      }
      const std::span<const SampledRow> found = rows.sample(cases);
      for (size_t r = 0; r < cases.size(); ++r) {
        expect_as_the_sampler(found[r], *cases[r], fmt::format("{}, greedy row {}", device, r));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Feed, pick on the host, feed.
std::vector<int32_t> plain_answer(Runtime& runtime, const Request& r) {
  Sampler sampler(r.sampling, runtime.config().vocab);
  sampler.add_prompt(r.tokens);
  kv::Sequence sequence = runtime.make_sequence();
  std::span<const float> logits = runtime.prefill(sequence, r.tokens);
  std::vector<int32_t> tokens;
  while (true) {
    tokens.push_back(sampler.sample(logits).token);
    if (tokens.size() == static_cast<size_t>(r.max_tokens)) return tokens;
    logits = runtime.prefill(sequence, {&tokens.back(), 1});
  }
}

TEST(Sampling, EnginesAnswerWhatAPlainLoopAnswers) {
  for (const std::string& device : sampling_devices()) {
    for (const std::string& model : {kWindowModel, kLlamaModel}) {
      EngineOptions options;
      options.model = model;
      options.device = device;
      options.threads = 1;
      options.context = 128;
      options.max_running = 12;
      options.step_tokens = 64;
      options.kv_tokens = 12 * 128;
      SamplingExecutor* stand_in = nullptr;
      Harness h(options, {}, nullptr,
                device == "reference" ? sampling_device(&stand_in) : std::function<void(RuntimeSetup&)>());
      const auto runtime = Runtime::open({.model = model, .device = device, .threads = 1, .context = 128});
      std::vector<std::vector<int32_t>> want;
      for (int i = 0; i < 12; ++i) {
        Request r;
        for (int t = 0; t < 5 + 7 * i; ++t) r.tokens.push_back(3 + (31 * i + 7 * t) % 200);
        r.max_tokens = 10 + 2 * i;
        r.ignore_end = true;
        r.sampling.seed = static_cast<uint64_t>(i);
        r.sampling.temperature = i % 3 == 0 ? 0.0f : 0.9f;
        if (i % 4 == 1) r.sampling.top_p = 0.8f;
        if (i % 4 == 2) r.sampling.top_k = 12;
        if (i == 3) r.sampling.presence_penalty = 0.5f;
        want.push_back(plain_answer(*runtime, r));
        h.submit(r);
      }
      h.run();
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_EQ(h.answers[i][0].tokens, want[i]) << device << " request " << i << h.answers[i][0].error;
      }
    }
  }
}

// One stream, each step launched before the last one's token is read.
TEST(Sampling, GreedyDecodingIsWhatAPlainLoopGives) {
  for (const std::string& device : sampling_devices()) {
    for (const std::string& model : {kWindowModel, kLlamaModel}) {
      RuntimeSetup setup;
      if (device == "reference") {
        setup.wrap_executor = [](std::unique_ptr<Executor> inner) {
          return std::make_unique<SamplingExecutor>(std::move(inner));
        };
      }
      const auto runtime =
          Runtime::open({.model = model, .device = device, .threads = 1, .context = 128}, setup);
      Request r;
      r.tokens = {5, 17, 40, 9};
      r.max_tokens = 60;
      r.sampling.temperature = 0.0f;
      const std::vector<int32_t> want = plain_answer(*runtime, r);
      kv::Sequence sequence = runtime->make_sequence();
      runtime->prefill(sequence, std::span(r.tokens).first(3));
      std::vector<int32_t> got(60);
      runtime->generate_greedy(sequence, r.tokens[3], std::span(got).first(25));
      runtime->generate_greedy(sequence, got[24], std::span(got).subspan(25));
      EXPECT_EQ(got, want) << device;
      EXPECT_EQ(sequence.length(), 63);
      std::vector<int32_t> too_many(80);
      EXPECT_THROW(runtime->generate_greedy(sequence, 7, too_many), Error);
    }
  }
}

}  // namespace
}  // namespace millrace::test
