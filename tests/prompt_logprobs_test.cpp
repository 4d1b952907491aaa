// Logprobs of a prompt's own tokens through the engine against transformers' logits, for tiny models of every
// architecture; and the same bits in any company. Few sequences run at once, so there are few rows of logits
// and prompts come in small pieces.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "golden_reader.h"
#include "millrace/engine.h"

namespace millrace {
namespace {

using Scores = std::shared_ptr<const std::vector<TokenLogprob>>;

std::unique_ptr<Engine> open(const std::string& model, const std::string& device, int32_t max_running) {
  EngineOptions options;
  options.model = model;
  options.device = device;
  options.threads = 2;
  options.context = 512;
  options.kv_tokens = 4096;
  options.kv_type = "f32";
  options.max_running = max_running;
  return Engine::create(options);
}

Request scored(const std::vector<int32_t>& tokens, int32_t top, int32_t samples = 1) {
  Request request;
  request.tokens = tokens;
  request.prompt_logprobs = top;
  request.sampling.temperature = 0;
  request.samples = samples;
  request.max_tokens = 2;
  request.ignore_end = true;
  return request;
}

// Of every sample: what its first event brings; no later one brings anything.
std::vector<Scores> read(EventStream& stream, int32_t samples) {
  std::vector<Scores> scores(static_cast<size_t>(samples));
  std::vector<int> tokens(scores.size(), 0);
  while (const std::optional<Event> event = stream.next()) {
    const auto sample = static_cast<size_t>(event->sample);
    EXPECT_NE(event->kind, Event::Kind::kFailed) << event->error;
    EXPECT_EQ(event->prompt != nullptr, event->kind == Event::Kind::kToken && tokens[sample] == 0);
    if (event->prompt) scores[sample] = event->prompt;
    if (event->kind == Event::Kind::kToken) ++tokens[sample];
  }
  for (const int count : tokens) EXPECT_EQ(count, 2);
  return scores;
}

double log_softmax(std::span<const float> logits, size_t at) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return logits[at] - largest - std::log(sum);
}

class PromptLogprobs : public testing::TestWithParam<std::string> {};

TEST_P(PromptLogprobs, AgreeWithTransformers) {
  const golden::Model model = golden::load_model(GetParam());
  const auto engine = open(model.paths.front(), "reference", 3);
  size_t compared = 0;
  for (const golden::Prompt& prompt : model.prompts) {
    EventStream stream = engine->submit(scored(prompt.tokens, 2));
    const Scores scores = read(stream, 1).front();
    ASSERT_TRUE(scores);
    ASSERT_EQ(scores->size(), prompt.tokens.size());
    EXPECT_TRUE(scores->front().top.empty());
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      const auto next = static_cast<size_t>(prompt.positions[i]) + 1;
      if (next >= scores->size()) continue;
      const TokenLogprob& score = (*scores)[next];
      EXPECT_EQ(score.token, prompt.tokens[next]);
      const std::span<const float> row = prompt.row(i);
      EXPECT_NEAR(score.logprob, log_softmax(row, static_cast<size_t>(score.token)), 2e-3);
      ASSERT_EQ(score.top.size(), 2u);
      for (const auto& [token, logprob] : score.top) {
        EXPECT_NEAR(logprob, log_softmax(row, static_cast<size_t>(token)), 2e-3);
      }
      EXPECT_GE(score.top[0].second, score.top[1].second);
      EXPECT_NEAR(score.top[0].second,
                  log_softmax(row, static_cast<size_t>(
                                       std::distance(row.begin(), std::max_element(row.begin(), row.end())))),
                  2e-3);
      ++compared;
    }
  }
  EXPECT_GT(compared, 4u);
}

INSTANTIATE_TEST_SUITE_P(Models, PromptLogprobs, testing::ValuesIn(golden::model_names()),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

bool same(const std::vector<TokenLogprob>& a, const std::vector<TokenLogprob>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TokenLogprob& x, const TokenLogprob& y) {
    return x.token == y.token && x.logprob == y.logprob && x.top == y.top;
  });
}

TEST(PromptLogprobsTogether, SameBitsInAnyCompanyAndForEverySample) {
  const golden::Model model = golden::load_model("llama3");
  const std::vector<int32_t>& tokens = model.prompts.front().tokens;
  for (const std::string& device : golden::device_names()) {
    SCOPED_TRACE(device);
    const auto alone = open(model.paths.front(), device, 64), company = open(model.paths.front(), device, 5);
    EventStream first = alone->submit(scored(tokens, 3));
    const Scores expected = read(first, 1).front();
    ASSERT_TRUE(expected);
    std::vector<EventStream> streams;
    for (int i = 0; i < 6; ++i) {
      Request plain;
      plain.tokens = tokens;
      plain.max_tokens = 20;
      plain.ignore_end = true;
      streams.push_back(company->submit(plain));
      streams.push_back(company->submit(scored(tokens, 3, 1 + i % 3)));
    }
    for (int i = 0; i < 6; ++i) {
      for (const Scores& scores : read(streams[static_cast<size_t>(2 * i + 1)], 1 + i % 3)) {
        ASSERT_TRUE(scores);
        EXPECT_TRUE(same(*scores, *expected));
      }
    }
  }
}

// The rows themselves, and every token's hidden state: in chunks, beside others, as transformers has them.
TEST(PromptRows, LogitsAgreeWithTransformersAndHaveTheSameBitsInAnyCompany) {
  for (const char* name : {"llama3", "gpt-oss-w32", "gemma2"}) {
    SCOPED_TRACE(name);
    const golden::Model model = golden::load_model(name);
    const auto engine = open(model.paths.front(), "reference", 3);
    for (const golden::Prompt& prompt : model.prompts) {
      Request request = scored(prompt.tokens, 0);
      request.prompt_logprobs.reset();
      request.prompt_logits = true;
      EventStream alone = engine->submit(request);
      const std::optional<Event> event = alone.next();
      ASSERT_TRUE(event && event->prompt_logits) << (event ? event->error : "no event");
      EXPECT_FALSE(event->prompt);
      const auto vocab = static_cast<size_t>(engine->model().vocab);
      ASSERT_EQ(event->prompt_logits->size(), prompt.tokens.size() * vocab);
      for (size_t i = 0; i < prompt.positions.size(); ++i) {
        const auto row =
            std::span(*event->prompt_logits).subspan(static_cast<size_t>(prompt.positions[i]) * vocab, vocab);
        EXPECT_LT(golden::relative_error(row, prompt.row(i)), 1e-4);
      }
      while (alone.next()) {
      }
      request.prompt_logprobs = 1;  // both from one pass
      EventStream beside = engine->submit(request), other = engine->submit(scored(prompt.tokens, 1));
      const std::optional<Event> both = beside.next();
      ASSERT_TRUE(both && both->prompt && both->prompt_logits);
      EXPECT_EQ(*both->prompt_logits, *event->prompt_logits);
    }
  }
}

TEST(PromptRows, HiddenStatesOfEveryTokenHaveTheMeanAndTheLastOfTheOtherPoolings) {
  const golden::Model model = golden::load_model("llama3");
  const auto engine = open(model.paths.front(), "cpu", 3);
  const std::vector<int32_t>& tokens = model.prompts.front().tokens;
  const auto embedding = [&](Pooling pooling) {
    Request request;
    request.tokens = tokens;
    request.embedding = pooling;
    EventStream stream = engine->submit(request);
    return stream.next().value_or(Event{}).embedding;
  };
  const std::vector<float> all = embedding(Pooling::kNone), mean = embedding(Pooling::kMean),
                           last = embedding(Pooling::kLast), first = embedding(Pooling::kFirst);
  ASSERT_EQ(all.size(), tokens.size() * mean.size());
  const size_t hidden = mean.size();
  EXPECT_TRUE(std::equal(first.begin(), first.end(), all.begin()));
  EXPECT_TRUE(std::equal(last.begin(), last.end(), all.end() - static_cast<ptrdiff_t>(hidden)));
  for (size_t i = 0; i < hidden; ++i) {
    double sum = 0;
    for (size_t t = 0; t < tokens.size(); ++t) sum += all[t * hidden + i];
    EXPECT_EQ(mean[i], static_cast<float>(sum / static_cast<double>(tokens.size())));
  }
}

TEST(PromptLogprobsTogether, WrongRequestsAreRefused) {
  const auto engine = open(golden::load_model("llama3").paths.front(), "cpu", 2);
  Request request = scored({1, 2, 3}, 1001);
  EXPECT_THROW(engine->submit(request), Error);
  request.prompt_logprobs = 1;
  request.embedding = Pooling::kMean;
  EXPECT_THROW(engine->submit(request), Error);
  request.prompt_logprobs.reset();
  request.prompt_logits = true;
  EXPECT_THROW(engine->submit(request), Error);
  Request one = scored({5}, 1);
  EventStream stream = engine->submit(one);
  const Scores scores = read(stream, 1).front();
  ASSERT_TRUE(scores);
  EXPECT_EQ(scores->size(), 1u);
  EXPECT_THROW(engine->submit(scored(std::vector<int32_t>(600, 1), 0)), PromptTooLong);
}

}  // namespace
}  // namespace millrace
