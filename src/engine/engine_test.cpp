// The public API on tiny models: answers, ends, cancellation, bad requests, clients that do not read.
#include "millrace/engine.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "engine/test_harness.h"

namespace millrace::test {
namespace {

using std::chrono::milliseconds;

struct Read {
  std::vector<Answer> answers;
  std::vector<Event> events;
};

Read read(EventStream& stream, int32_t samples = 1) {
  Read out;
  out.answers.resize(static_cast<size_t>(samples));
  while (auto event = stream.next()) {
    Answer& a = out.answers[static_cast<size_t>(event->sample)];
    a.text += event->text;
    if (event->kind == Event::Kind::kToken) {
      a.tokens.push_back(event->token);
    } else {
      a.ended = true;
      a.finish = event->finish;
      a.usage = event->usage;
      a.error = event->error;
    }
    out.events.push_back(std::move(*event));
  }
  return out;
}

std::string error_of(Engine& engine, const Request& request) {
  try {
    engine.submit(request);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Engine, AnswersManyClientsFromManyThreads) {
  const auto engine = Engine::create(small_options());
  std::vector<Request> requests;
  std::vector<std::vector<Answer>> want;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(greedy_request({5 + i, 17, 40 + i, 9}, 8 + i));
    requests.back().sampling = {.temperature = 0.9f, .seed = static_cast<uint64_t>(i)};
    want.push_back(run_alone(kLlamaModel, requests.back()));
  }
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (size_t c = 0; c < 12; ++c) {
    clients.emplace_back([&, c] {
      EventStream stream = engine->submit(requests[c % requests.size()]);
      const Read got = read(stream);
      const Answer& a = got.answers[0];
      if (a.tokens != want[c % requests.size()][0].tokens || a.finish != FinishReason::kMaxTokens) ++wrong;
      if (a.usage.generated_tokens != static_cast<int32_t>(a.tokens.size()) || a.usage.prompt_tokens != 4)
        ++wrong;
      if (!(a.usage.queue_s <= a.usage.first_token_s && a.usage.first_token_s <= a.usage.total_s)) ++wrong;
      if (!stream.done()) ++wrong;
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong, 0);
  engine->shutdown(true);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.submitted, 12u);
  EXPECT_EQ(stats.finished, 12u);
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_EQ(stats.first_token.total(), 12u);
  EXPECT_EQ(stats.generated_tokens, stats.first_token.total() + stats.inter_token.total());
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.blocks_total, stats.blocks_used + stats.blocks_cached + stats.blocks_free);
}

TEST(Engine, SamplesShareAPromptAndDifferInSeed) {
  const auto engine = Engine::create(small_options());
  Request r = greedy_request({5, 17, 40, 9, 33}, 10);
  r.sampling = {.temperature = 1.0f, .seed = 3};
  r.samples = 4;
  EventStream stream = engine->submit(r);
  const Read got = read(stream, 4);
  for (const Answer& a : got.answers) EXPECT_EQ(a.tokens.size(), 10u);
  EXPECT_NE(got.answers[0].tokens, got.answers[1].tokens);
  EXPECT_NE(got.answers[1].tokens, got.answers[2].tokens);
  r.samples = 1;
  EventStream alone = engine->submit(r);
  EXPECT_EQ(read(alone).answers[0].tokens, got.answers[0].tokens) << "sample 0 has the request's own seed";
}

TEST(Engine, EndsWhereItIsTold) {
  const auto engine = Engine::create(small_options());
  EventStream plain = engine->submit(greedy_request({5, 17, 40, 9}, 20));
  const Answer want = read(plain).answers[0];
  ASSERT_EQ(want.tokens.size(), 20u);

  Request tokens = greedy_request({5, 17, 40, 9}, 20);
  tokens.stop_tokens = {want.tokens[7]};
  EventStream by_token = engine->submit(tokens);
  const Answer stopped = read(by_token).answers[0];
  EXPECT_EQ(stopped.finish, FinishReason::kEndToken);
  EXPECT_LE(stopped.tokens.size(), 8u);

  ASSERT_GT(want.text.size(), 6u);
  Request text = greedy_request({5, 17, 40, 9}, 20);
  text.stop = {want.text.substr(3, 3)};
  EventStream by_text = engine->submit(text);
  const Answer cut = read(by_text).answers[0];
  EXPECT_EQ(cut.finish, FinishReason::kStopString);
  EXPECT_EQ(cut.text, want.text.substr(0, want.text.find(text.stop[0])));

  EventStream full = engine->submit(greedy_request({5, 17, 40, 9}, 0));
  const Answer context = read(full).answers[0];
  EXPECT_EQ(context.finish, FinishReason::kContext);
  EXPECT_EQ(context.tokens.size(), 128u - 4 + 1);
}

TEST(Engine, LogprobsComeWithTheTokens) {
  const auto engine = Engine::create(small_options());
  Request r = greedy_request({5, 17, 40}, 3);
  r.sampling.logprobs = 2;
  EventStream stream = engine->submit(r);
  for (const Event& event : read(stream).events) {
    if (event.kind != Event::Kind::kToken) continue;
    ASSERT_EQ(event.top.size(), 2u);
    EXPECT_EQ(event.top[0].first, event.token);
    EXPECT_DOUBLE_EQ(event.top[0].second, event.logprob);
    EXPECT_LT(event.logprob, 0.0);
  }
}

// Even tokens only, then odd ones only.
class Alternating final : public TokenConstraint {
 public:
  std::unique_ptr<TokenConstraint> clone() const override { return std::make_unique<Alternating>(*this); }
  bool allowed(std::span<uint64_t> mask) override {
    for (uint64_t& word : mask) word = odd_ ? 0xaaaaaaaaaaaaaaaau : 0x5555555555555555u;
    return true;
  }
  void accept(int32_t) override { odd_ = !odd_; }

 private:
  bool odd_ = false;
};

TEST(Engine, AConstraintDecidesWhatMayCome) {
  EngineOptions options = small_options();
  options.speculation = Speculation::kLookup;
  const auto engine = Engine::create(options);
  Request r = greedy_request({5, 17, 40}, 12);
  r.constraint = std::make_shared<Alternating>();
  r.samples = 2;
  r.sampling = {.temperature = 1.0f, .seed = 1};
  EventStream stream = engine->submit(r);
  for (const Answer& a : read(stream, 2).answers) {
    ASSERT_EQ(a.tokens.size(), 12u);
    for (size_t i = 0; i < a.tokens.size(); ++i) EXPECT_EQ(a.tokens[i] % 2, static_cast<int32_t>(i % 2));
  }
}

// By hand, round by round: with the engine's own thread, a short answer may be whole before it is cancelled.
TEST(Engine, CancellationDeadlinesAndDroppedStreamsFreeEverything) {
  Harness h(small_options());
  h.submit(greedy_request({1, 2, 3}, 0));
  h.streams[0].cancel();
  Request late = greedy_request({1, 2, 3}, 0);
  late.deadline = std::chrono::steady_clock::now() - milliseconds(1);
  h.submit(late);
  const size_t gone = h.submit(greedy_request({1, 2, 3, 4}, 0));
  h.loop->turn();
  { const EventStream dropped = std::move(h.streams[gone]); }
  while (h.loop->turn()) continue;
  h.read(0);
  h.read(1);
  EXPECT_EQ(h.answers[0][0].finish, FinishReason::kCancelled);
  EXPECT_EQ(h.answers[1][0].finish, FinishReason::kDeadline);
  const EngineStats stats = h.recorder->snapshot();
  EXPECT_EQ(stats.expired, 1u);
  EXPECT_EQ(stats.cancelled, 2u);
  EXPECT_EQ(stats.finished, 0u);
  EXPECT_EQ(stats.blocks_used, 0);
}

TEST(Engine, ARequestIsCancelledByItsNumber) {
  Harness h(small_options());
  h.submit(greedy_request({1, 2, 3}, 0));
  h.submit(greedy_request({4, 5, 6}, 20));
  h.loop->turn();
  h.inbox->cancel(h.streams[0].id());
  h.inbox->cancel(h.streams[0].id() + 1000);  // nobody's
  h.run();
  EXPECT_EQ(h.answers[0][0].finish, FinishReason::kCancelled);
  EXPECT_EQ(h.answers[0][0].tokens.size(), 1u);
  EXPECT_EQ(h.answers[1][0].tokens.size(), 20u);
}

TEST(Engine, TextAndMessagesAreWhatTheirTokensAre) {
  const auto engine = Engine::create(small_options("tests/golden/models/gpt-oss-w32/hf"));
  const auto answer = [&](Request r) {
    r.max_tokens = 6;
    r.ignore_end = true;
    r.sampling.temperature = 0.0f;
    EventStream stream = engine->submit(r);
    return read(stream).answers[0];
  };
  Request text, tokens, messages;
  text.text = "hello mill";
  tokens.tokens = engine->tokenize("hello mill");
  EXPECT_EQ(answer(text).tokens, answer(tokens).tokens);
  messages.messages = {{.role = "user", .content = "hi"}};
  tokens.tokens = engine->tokenize(engine->render_chat(messages.messages), false);
  const Answer chat = answer(messages);
  EXPECT_EQ(chat.tokens, answer(tokens).tokens);
  EXPECT_EQ(chat.usage.prompt_tokens, static_cast<int32_t>(tokens.tokens.size()));
}

TEST(Engine, OneSampleIsCancelledAndTheOthersGoOn) {
  EngineOptions options = small_options();
  Harness h(options);
  Request r = greedy_request({1, 2, 3}, 30);
  r.samples = 3;
  h.submit(r);
  h.streams[0].cancel_sample(1);  // not there yet: nothing happens
  h.loop->turn();
  h.loop->turn();
  h.streams[0].cancel_sample(1);
  h.run();
  EXPECT_EQ(h.answers[0][1].finish, FinishReason::kCancelled);
  EXPECT_EQ(h.answers[0][1].tokens.size(), 2u);
  for (const size_t i : {0, 2}) {
    EXPECT_EQ(h.answers[0][i].finish, FinishReason::kMaxTokens);
    EXPECT_EQ(h.answers[0][i].tokens.size(), 30u);
  }
}

TEST(Engine, AClientThatNeverReadsStopsNobody) {
  const auto engine = Engine::create(small_options());
  std::vector<EventStream> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(engine->submit(greedy_request({7, 8, 9 + i}, 0)));
  EventStream other = engine->submit(greedy_request({5, 17, 40, 9}, 20));
  EXPECT_EQ(read(other).answers[0].tokens.size(), 20u);
  engine->shutdown(true);
  for (EventStream& stream : silent)
    EXPECT_EQ(read(stream).answers[0].tokens.size(), 126u) << "nothing was lost";
}

TEST(Engine, NotifiesWhenAStreamHasNews) {
  const auto engine = Engine::create(small_options());
  std::atomic<int> calls{0};
  EventStream stream = engine->submit(greedy_request({5, 17}, 5));
  stream.on_ready([&] { ++calls; });
  EXPECT_EQ(read(stream).answers[0].tokens.size(), 5u);
  EXPECT_GE(calls.load(), 1);
}

TEST(Engine, BadRequestsAreNamed) {
  const auto engine = Engine::create(small_options());
  const auto has = [&](const Request& r, const char* piece) {
    const std::string error = error_of(*engine, r);
    EXPECT_NE(error.find(piece), std::string::npos) << "found: " << error << ", expected: " << piece;
  };
  has({}, "exactly one");
  Request both = greedy_request({1}, 1);
  both.text = "x";
  has(both, "exactly one");
  has(greedy_request({-1}, 1), "token id: found -1");
  has(greedy_request(std::vector<int32_t>(129, 1), 1), "129 tokens");
  Request samples = greedy_request({1}, 1);
  samples.samples = 9;
  has(samples, "samples: found 9");
  Request hot = greedy_request({1}, 1);
  hot.sampling.temperature = -1.0f;
  has(hot, "temperature is -1");
  has(greedy_request({1}, -1), "max_tokens: found -1");
  EngineOptions nothing;
  EXPECT_THROW(Engine::create(nothing), Error);
  EngineOptions tiny = small_options();
  tiny.kv_tokens = 64;
  EXPECT_THROW(Engine::create(tiny), Error);
}

TEST(Engine, TooManyAreToldSoAndSoAreThoseWhoComeTooLate) {
  EngineOptions options = small_options();
  options.max_waiting = 0;
  const auto engine = Engine::create(options);
  EventStream busy = engine->submit(greedy_request({1, 2}, 3));
  const Event event = *busy.next();
  EXPECT_EQ(event.kind, Event::Kind::kFailed);
  EXPECT_EQ(event.code, ErrorCode::kBusy);
  EXPECT_FALSE(busy.next().has_value());
  engine->shutdown(true);
  EventStream late = engine->submit(greedy_request({1, 2}, 3));
  EXPECT_EQ(late.next()->code, ErrorCode::kBusy);
}

TEST(Engine, ShutdownWithoutDrainCancelsWhatRuns) {
  const auto engine = Engine::create(small_options());
  std::vector<EventStream> streams;
  for (int i = 0; i < 20; ++i) streams.push_back(engine->submit(greedy_request({1, 2, i}, 0)));
  engine->shutdown(false);
  for (EventStream& stream : streams) {
    const Answer a = read(stream).answers[0];
    EXPECT_TRUE(a.ended);
    EXPECT_TRUE(a.finish == FinishReason::kCancelled || a.finish == FinishReason::kContext);
  }
}

TEST(Engine, QuantizedWeightsDoNotTakeTheBlocksOfOthersFromDisk) {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / fmt::format("millrace-engine-test-{}", ::getpid());
  const std::shared_ptr<void> cleanup(nullptr, [&](void*) { std::filesystem::remove_all(directory); });
  std::vector<int32_t> prompt(48);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i % 37) + 5;
  const auto cached = [&](const char* quantize, const char* kv_type = "") {
    EngineOptions options = small_options();
    options.kv_dir = directory.string();
    options.quantize = quantize;
    options.kv_type = kv_type;
    auto engine = Engine::create(options);
    EventStream stream = engine->submit(greedy_request(prompt, 2));
    const int32_t found = read(stream).answers[0].usage.cached_tokens;
    engine->shutdown(true);
    return found;
  };
  EXPECT_EQ(cached(""), 0);
  EXPECT_GE(cached(""), 32);
  EXPECT_EQ(cached("q8_0"), 0);
  EXPECT_GE(cached("q8_0"), 32);
  EXPECT_EQ(cached("", "f32"), 0) << "another type of cache";
  EXPECT_GE(cached("", "f32"), 32);
  EngineOptions options = small_options();
  options.quantize = "nope";
  EXPECT_THROW(Engine::create(options), Error);
}

TEST(Engine, TokenizesAndRenders) {
  const auto engine = Engine::create(small_options("tests/golden/models/gpt-oss-w32/hf"));
  EXPECT_TRUE(engine->model().has_tokenizer);
  ASSERT_TRUE(engine->model().has_chat_template);
  const std::vector<int32_t> ids = engine->tokenize("hello");
  EXPECT_EQ(engine->detokenize(ids), "hello");
  const std::string text = engine->render_chat({{.role = "user", .content = "hello"}});
  EXPECT_NE(text.find("hello"), std::string::npos);
  EXPECT_EQ(text, engine->render_chat_json(R"({"messages": [{"role": "user", "content": "hello"}]})"));
  EXPECT_THROW(engine->render_chat_json("[1]"), Error);
}

}  // namespace
}  // namespace millrace::test
