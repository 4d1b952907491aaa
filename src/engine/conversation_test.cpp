// Conversations on models whose layers have a state: each turn finds all of the turns before it but the block
// that is not full, with drafts that are accepted and without, forked into several answers, swapped away in
// in another process from disk; and says what it says cold.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "engine/test_harness.h"

namespace millrace::test {
namespace {

namespace fs = std::filesystem;

struct Way {
  bool drafts = false, restarts = false;
  int32_t samples = 1;
};

class Conversation : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int32_t kContext = 512, kTurns = 10;

  std::string model() const { return "tests/golden/models/" + GetParam() + "/model.gguf"; }

  EngineOptions options_of(const Way& way) const {
    EngineOptions options{.model = model(), .threads = 2, .context = kContext, .max_running = 4};
    options.step_tokens = 48;
    options.kv_tokens = 4096;
    if (way.drafts) options.speculation = Speculation::kLookup;
    return options;
  }

  static Request request_of(std::vector<int32_t> tokens, int32_t turn, int32_t samples) {
    Request r;
    r.tokens = std::move(tokens);
    r.max_tokens = 13 + turn * 7 % 23;
    r.samples = samples;
    r.ignore_end = true;
    r.sampling.temperature = turn % 2 == 0 ? 0.0f : 0.8f;
    r.sampling.seed = static_cast<uint64_t>(turn);
    // Answers of a few tokens repeat themselves: drafts from the text are accepted.
    for (int32_t t = 0; t < 1 + turn % 3; ++t) r.sampling.logit_bias[40 + 10 * turn + t] = 1000.0f;
    return r;
  }

  // The answers of one turn by an engine that remembers nothing.
  std::vector<Answer> cold(const Request& request) {
    if (!cold_) {
      EngineOptions options = options_of({});
      options.prefix_cache = false;
      cold_ = std::make_unique<Harness>(options);
    }
    const size_t id = cold_->submit(request);
    cold_->run();
    return cold_->answers[id];
  }

  uint64_t talk(const Way& way) {
    const fs::path directory =
        fs::path(testing::TempDir()) / fmt::format("conversation_{}_{}", GetParam(), ::getpid());
    fs::remove_all(directory);
    EngineOptions options = options_of(way);
    if (way.restarts) {
      options.kv_dir = directory.string();
      options.kv_dir_bytes = size_t{256} << 20;
    }
    auto life = std::make_unique<Harness>(options);
    std::vector<int32_t> text;
    uint64_t accepted = 0;
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const auto known = static_cast<int32_t>(text.size());
      for (int32_t i = 0; i < 7 + turn * 11 % 19; ++i) text.push_back(3 + (turn * 31 + i * 7) % 200);
      const Request request = request_of(text, turn, way.samples);
      const size_t id = life->submit(request);
      life->run([&] { life->runtime->cache().check_invariants(); });
      const std::vector<Answer>& got = life->answers[id];
      // The last token of an answer has not been computed; of the rest whole blocks are known.
      EXPECT_GE(got[0].usage.cached_tokens, std::max(0, known - 1) / kBlockTokens * kBlockTokens) << turn;
      const std::vector<Answer> want = cold(request);
      for (size_t s = 0; s < want.size(); ++s) {
        EXPECT_TRUE(got[s].ended);
        EXPECT_EQ(got[s].tokens, want[s].tokens) << "turn " << turn << " answer " << s;
      }
      if (testing::Test::HasFailure()) break;
      text.insert(text.end(), got.back().tokens.begin(), got.back().tokens.end());
      if (!way.restarts) continue;
      life->runtime->cache().flush();
      accepted += life->recorder->accepted.load();
      life.reset();
      life = std::make_unique<Harness>(options);
    }
    accepted += life->recorder->accepted.load();
    life.reset();
    fs::remove_all(directory);
    return accepted;
  }

  std::unique_ptr<Harness> cold_;
};

TEST_P(Conversation, EachTurnFindsTheOnesBefore) { talk({}); }
TEST_P(Conversation, WithDraftsThatAreAccepted) { EXPECT_GT(talk({.drafts = true}), 20u); }
TEST_P(Conversation, WithSeveralAnswers) { talk({.drafts = true, .samples = 3}); }
TEST_P(Conversation, AfterARestartEachTurn) { EXPECT_GT(talk({.drafts = true, .restarts = true}), 20u); }

INSTANTIATE_TEST_SUITE_P(Models, Conversation,
                         testing::Values("qwen3next", "kimi-linear", "falcon-h1", "mamba2", "lfm2", "rwkv7"),
                         [](const auto& one) {
                           std::string name = one.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace millrace::test
