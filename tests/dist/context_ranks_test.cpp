// A model whose contexts are spread over ranks that are threads of this process: the bits of one process, for
// prompts that several ranks keep parts of, however they are cut, whoever else runs, wherever KV blocks go.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "base/error.h"
#include "dist/watched_communicator.h"
#include "engine/rank_messages.h"
#include "engine/rank_plan.h"
#include "engine/runtime.h"
#include "engine/test_harness.h"
#include "tests/dist/with_ranks.h"
#include "tests/golden_reader.h"

namespace millrace {
namespace {

using test::with_ranks;

// Three ranks have 512 tokens each, and the first some more.
constexpr int32_t kContext = 2048, kPrompt = 1600;

EngineOptions options_for(const std::string& path, int ranks, const std::string& kv_type = "",
                          const std::string& schedule = "auto") {
  return {.model = path,
          .device = "cpu",
          .threads = 1,
          .context = kContext,
          .kv_type = kv_type,
          .context_parallel = ranks,
          .context_schedule = schedule,
          .step_tokens = kContext};
}

std::unique_ptr<Runtime> open(const EngineOptions& options,
                              std::shared_ptr<dist::Communicator> group = nullptr) {
  return Runtime::open(options, {.sequences = 2, .logit_rows = 64, .group = std::move(group)});
}

std::vector<int32_t> some_tokens(int32_t count, int32_t vocab) {
  std::mt19937 random(5);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i) {
    tokens.push_back(std::uniform_int_distribution<int32_t>(3, std::min(vocab, 250) - 1)(random));
  }
  return tokens;
}

struct Seen {
  std::vector<float> logits;
  std::vector<int32_t> greedy;
  bool operator==(const Seen& other) const {
    return greedy == other.greedy && logits.size() == other.logits.size() &&
           std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0;
  }
};

// Logits of the prompt's last 40 tokens: 30 in one piece, which ranks share, 7 in one that is everybody's,
// and 3 alone; then tokens. What is before them comes in pieces of `chunk`. Another sequence steps with them.
Seen look(Runtime& runtime, std::span<const int32_t> prompt, size_t chunk) {
  kv::Sequence sequence = runtime.make_sequence(), other = runtime.make_sequence();
  Seen seen;
  const std::span<const int32_t> few = prompt.first(3);
  const auto step = [&](size_t count, StepInput::Want want) {
    const StepInput inputs[] = {{.sequence = &other, .tokens = few, .want = StepInput::Want::kNone},
                                {.sequence = &sequence, .tokens = prompt.first(count), .want = want}};
    const std::span<const float> logits = runtime.step(inputs);
    seen.logits.insert(seen.logits.end(), logits.begin(), logits.end());
    prompt = prompt.subspan(count);
  };
  while (prompt.size() > 41) step(std::min(chunk, prompt.size() - 41), StepInput::Want::kNone);
  step(30, StepInput::Want::kAll);
  step(7, StepInput::Want::kAll);
  for (int i = 0; i < 3; ++i) step(1, StepInput::Want::kLast);
  seen.greedy.resize(6);
  runtime.generate_greedy(sequence, prompt.front(), seen.greedy);
  return seen;
}

void expect_same(const std::string& path, std::span<const int32_t> prompt, const Seen& expected, int ranks,
                 const std::string& kv_type = "", const std::string& schedule = "auto") {
  SCOPED_TRACE(path + " over " + std::to_string(ranks) + " ranks " + kv_type + " " + schedule);
  const EngineOptions options = options_for(path, ranks, kv_type, schedule);
  with_ranks(ranks, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    const auto runtime = open(options, std::move(group));
    EXPECT_TRUE(look(*runtime, prompt, kContext - 64) == expected);
    EXPECT_TRUE(look(*runtime, prompt, 333) == expected);
  });
}

Seen alone(const std::string& path, std::span<const int32_t> prompt, const std::string& kv_type = "") {
  return look(*open(options_for(path, 1, kv_type)), prompt, kContext - 64);
}

class ContextOverRanks : public testing::TestWithParam<std::string> {};

TEST_P(ContextOverRanks, HasTheBitsOfOneProcess) {
  const golden::Model model = golden::load_model(GetParam());
  const std::vector<int32_t> prompt = some_tokens(kPrompt, model.vocab_size);
  const Seen expected = alone(model.paths.back(), prompt);
  for (const int ranks : {2, 3, 4, 8}) {
    for (const char* schedule : {"ring", "mesh", "wallfacer"}) {
      expect_same(model.paths.back(), prompt, expected, ranks, "", schedule);
    }
  }
}

// Full attention with groups of heads; windows and sinks; soft caps and windows; chunks of attention.
INSTANTIATE_TEST_SUITE_P(Models, ContextOverRanks,
                         testing::Values("llama3", "gpt-oss-w32", "gemma2", "llama4"));

// Not only alike: right. The oracle is what transformers recorded (ranks_test.cpp).
TEST(ContextRanks, AgreesWithTransformers) {
  const golden::Model model = golden::load_model("gpt-oss-w32");
  const golden::Prompt& prompt = model.prompts.front();
  const EngineOptions options = options_for(model.paths.back(), 2);
  with_ranks(2, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    const auto runtime =
        Runtime::open(options, {.sequences = 1, .logit_rows = kContext, .group = std::move(group)});
    kv::Sequence sequence = runtime->make_sequence();
    const StepInput input{.sequence = &sequence, .tokens = prompt.tokens, .want = StepInput::Want::kAll};
    const std::span<const float> logits = runtime->step({&input, 1});
    std::vector<double> errors;
    const auto vocab = static_cast<size_t>(model.vocab_size);
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      const auto row = logits.subspan(static_cast<size_t>(prompt.positions[i]) * vocab, vocab);
      errors.push_back(golden::relative_error(row, prompt.row(i)));
    }
    std::sort(errors.begin(), errors.end());
    ASSERT_FALSE(errors.empty());
    EXPECT_LT(errors[errors.size() / 2], 0.06);
  });
}

TEST(ContextRanks, EveryTypeOfCache) {
  const golden::Model model = golden::load_model("llama3");
  const std::vector<int32_t> prompt = some_tokens(700, model.vocab_size);
  for (const char* type : {"f32", "f16", "fp8"}) {
    expect_same(model.paths.back(), prompt, alone(model.paths.back(), prompt, type), 2, type, "mesh");
  }
}

// Its blocks are of 32 values: heads of 32 and more have them.
TEST(ContextRanks, ACacheOfInt8) {
  const golden::Model model = golden::load_model("qwen3");
  const std::vector<int32_t> prompt = some_tokens(1300, model.vocab_size);
  for (const char* schedule : {"ring", "mesh"}) {
    expect_same(model.paths.back(), prompt, alone(model.paths.back(), prompt, "int8"), 3, "int8", schedule);
  }
}

// Every rank has all of an adapter, and its rows of a step are of the sequences that name one. A prompt that
// several ranks keep parts of, cut in two ways, beside another sequence with no adapter.
TEST(ContextRanks, AdaptersHaveTheBitsOfOneProcess) {
  for (const char* name :
       {"llama3", "gemma3", "qwen2moe", "mixtral-experts", "gpt-oss-experts", "qwen3moe-experts"}) {
    const std::string folder = golden::kRoot + "adapters/" + name + "/";
    const std::string model = golden::read_json(folder + "golden.json").at("model");
    EngineOptions options = options_for(golden::kRoot + "models/" + model + "/hf", 1);
    options.adapters = {"a=" + folder + "peft"};
    const std::vector<int32_t> prompt = some_tokens(1100, 250);
    const auto seen = [&](std::shared_ptr<dist::Communicator> group, bool adapted, size_t chunk) {
      RuntimeSetup setup{.sequences = 2, .logit_rows = 64, .group = std::move(group)};
      setup.adapter = adapted ? 0 : -1;
      return look(*Runtime::open(options, setup), prompt, chunk);
    };
    const Seen expected = seen(nullptr, true, kContext - 64);
    EXPECT_FALSE(expected == seen(nullptr, false, kContext - 64)) << name;
    for (const auto& way : {std::pair{2, "mesh"}, {3, "ring"}}) {
      options.context_parallel = way.first;
      options.context_schedule = way.second;
      SCOPED_TRACE(std::string(name) + ", " + way.second);
      with_ranks(way.first, {options}, [&](std::shared_ptr<dist::Communicator> group) {
        EXPECT_TRUE(seen(std::move(group), true, 333) == expected);
      });
    }
    options.context_parallel = 1;
    options.context_schedule = "auto";
  }
}

// The short prompts of every golden model: the same bits, or a refusal in one line.
TEST(ContextRanks, EveryArchitectureWorksOrIsRefused) {
  const std::set<std::string> refused = {"deepseek2",     "deepseek32",     "mistral4",  "qwen3next",
                                         "qwen35",        "qwen35moe",      "lfm2",      "lfm2moe",
                                         "granitehybrid", "mamba2",         "falcon-h1", "nemotron_h",
                                         "kimi-linear",   "nemotron_h_moe", "rwkv7",     "gemma4"};
  size_t worked = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/golden/models")) {
    const golden::Model model = golden::load_model(entry.path().filename().string());
    const std::string& path = model.paths.back();
    EngineOptions options = options_for(path, 2);
    options.context = options.step_tokens = 128;
    SCOPED_TRACE(path);
    if (refused.contains(model.architecture)) {
      EXPECT_THROW(open(options), Error);
      continue;
    }
    const std::span<const int32_t> all = model.prompts.front().tokens;
    const std::vector<int32_t> prompt(all.begin(),
                                      all.begin() + std::min<std::ptrdiff_t>(std::ssize(all), 60));
    if (prompt.size() < 45) continue;
    EngineOptions one = options;
    one.context_parallel = 1;
    const Seen expected = look(*open(one), prompt, 128);
    // Every number of ranks and schedule has its turn; long prompts above have all of them.
    const int ranks = std::array{2, 3, 4, 8}[worked % 4];
    const char* const schedule = std::array{"ring", "mesh", "wallfacer"}[worked % 3];
    SCOPED_TRACE(std::to_string(ranks) + " ranks, " + schedule);
    options.context_parallel = ranks;
    options.context_schedule = schedule;
    with_ranks(ranks, {options}, [&](std::shared_ptr<dist::Communicator> group) {
      EXPECT_TRUE(look(*open(options, std::move(group)), prompt, 128) == expected);
    });
    ++worked;
  }
  EXPECT_GT(worked, 10u);
}

// Requests that come, share prompts, fork, are swapped out to RAM and computed again, want embeddings: the
// answers of each alone. A pool has room for one of the long prompts and a half, and shelves run out one by
// one.
TEST(ContextRanks, RandomSchedules) {
  std::mt19937 random(28);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (const std::string& model : {test::kLlamaModel, test::kWindowModel}) {
    std::vector<int32_t> document;
    for (int i = 0; i < 1200; ++i) document.push_back(pick(3, 249));
    std::vector<Request> requests;
    for (int i = 0; i < 8; ++i) {
      Request r;
      r.tokens.assign(document.begin(), document.begin() + (i % 2 == 0 ? pick(500, 1200) : pick(1, 60)));
      for (int j = pick(0, 8); j > 0; --j) r.tokens.push_back(pick(3, 249));
      r.max_tokens = pick(1, 20);
      r.samples = pick(1, 3) == 1 ? 2 : 1;
      r.ignore_end = true;
      r.sampling.seed = static_cast<uint64_t>(i);
      r.sampling.temperature = pick(0, 1) == 0 ? 0.0f : 0.8f;
      if (i == 4) r.embedding = Pooling::kMean;
      if (r.embedding) r.samples = 1;
      requests.push_back(r);
    }
    EngineOptions options = options_for(model, 2);
    options.context = 1280;
    options.max_running = 8;
    options.step_tokens = 300;
    options.ram_tier_bytes = size_t{1} << 20;
    with_ranks(2, {options}, [&](std::shared_ptr<dist::Communicator> group) {
      const auto change = [&](RuntimeSetup& setup) { setup.group = group; };
      const size_t groups = model == test::kWindowModel ? 2 : 1;
      test::Harness harness(options, std::vector<int32_t>(groups, 120), nullptr, change);
      group.reset();
      size_t next = 0;
      while (next < requests.size()) {
        if (pick(0, 1) == 0) harness.submit(requests[next++]);
        harness.loop->turn();
        harness.runtime->cache().check_invariants();
        harness.read_all();
      }
      harness.run();
      EXPECT_GT(harness.runtime->cache().stats().hit_tokens, 0u);
      EngineOptions one = options;
      one.context_parallel = 1;
      for (size_t i = 0; i < requests.size(); ++i) {
        test::Harness single(one, std::vector<int32_t>(groups, 400));
        single.submit(requests[i]);
        single.run();
        for (size_t s = 0; s < single.answers[0].size(); ++s) {
          EXPECT_EQ(harness.answers[i][s].error, "");
          EXPECT_EQ(harness.answers[i][s].tokens, single.answers[0][s].tokens) << model << " request " << i;
          EXPECT_EQ(harness.answers[i][s].embedding, single.answers[0][s].embedding)
              << model << " request " << i;
        }
      }
    });
  }
}

// What the option is for: with C ranks each holds a C-th of a context's keys and values.
TEST(ContextRanks, ARankHoldsItsPart) {
  const ModelConfig config = read_config(io::Checkpoint::open(test::kWindowModel));
  ExecutorLimits limits{.max_tokens = 512, .max_context = 3 * 8192, .sequences = 1};
  const ExecutorSpec one = make_executor_spec(config, limits);
  limits.context_ranks = 3;
  const ExecutorSpec three = make_executor_spec(config, limits);
  for (size_t g = 0; g < one.kv_groups.size(); ++g) {
    const bool full = one.kv_groups[g].window == 0;
    EXPECT_EQ(three.kv_groups[g].blocks_here() * (full ? 3 : 1), one.kv_groups[g].num_blocks);
  }
}

// What a decoded token moves is what the plan says, to the byte.
TEST(ContextRanks, ThePlanSaysWhatIsExchanged) {
  for (const std::string& path : {test::kLlamaModel, test::kWindowModel}) {
    const EngineOptions options = options_for(path, 2);
    const ContextPlan plan = plan_context(read_config(io::Checkpoint::open(path)),
                                          {.context = 1024, .ranks = options.context_parallel});
    const std::vector<int32_t> tokens = some_tokens(1024, 250);
    with_ranks(2, {options}, [&](std::shared_ptr<dist::Communicator> group) {
      const auto runtime = open(options, group);
      kv::Sequence sequence = runtime->make_sequence();
      runtime->prefill(sequence, std::span(tokens).first(1023));
      const uint64_t before = group->traffic().bytes_received;
      const StepInput input{
          .sequence = &sequence, .tokens = std::span(tokens).last(1), .want = StepInput::Want::kLast};
      runtime->step({&input, 1});
      EXPECT_EQ(group->traffic().bytes_received - before, plan.received_per_token);
    });
  }
}

// The same of a prompt, under each schedule: a step behind nothing, and one behind it that ends in logits.
TEST(ContextRanks, ThePlanSaysWhatAPromptExchanges) {
  const std::vector<int32_t> tokens = some_tokens(1400, 250);
  for (const std::string& path : {test::kLlamaModel, test::kWindowModel}) {
    for (const auto& way : {std::pair{2, "mesh"}, {3, "ring"}, {4, "mesh"}, {4, "wallfacer"}, {4, "auto"}}) {
      const int ranks = way.first;
      const std::string schedule = way.second;
      SCOPED_TRACE(path + " over " + std::to_string(ranks) + " ranks, " + schedule);
      const EngineOptions options = options_for(path, ranks, "", schedule);
      const dist::ScheduleKind kind = dist::schedule_kind(schedule).value();
      with_ranks(ranks, {options}, [&](std::shared_ptr<dist::Communicator> group) {
        const auto runtime = open(options, group);
        kv::Sequence sequence = runtime->make_sequence();
        const auto step = [&](size_t first, size_t rows, StepInput::Want want) {
          const uint64_t before = group->traffic().bytes_received;
          const StepInput input{
              .sequence = &sequence, .tokens = std::span(tokens).subspan(first, rows), .want = want};
          runtime->step({&input, 1});
          const PromptStepPlan plan =
              plan_prompt_step(runtime->spec(), ranks, kind, static_cast<int64_t>(first),
                               static_cast<int64_t>(rows), want == StepInput::Want::kLast);
          EXPECT_EQ(group->traffic().bytes_received - before, plan.received[0]);
        };
        step(0, 1100, StepInput::Want::kNone);
        step(1100, 300, StepInput::Want::kLast);
      });
    }
  }
}

// Of every rank, where nothing is even: prime numbers of rows, of positions before them and of ranks. Ranks
// but the first get rank 0's orders besides.
TEST(ContextRanks, ThePlanSaysWhatEveryRankReceives) {
  constexpr size_t kFirst = 1097, kRows = 211;
  const std::vector<int32_t> tokens = some_tokens(kFirst + kRows, 250), any_table(128);
  for (const std::string& path : {test::kLlamaModel, test::kWindowModel}) {
    for (const auto& way : {std::pair{5, "ring"}, {5, "mesh"}, {6, "mesh"}, {7, "auto"}, {8, "wallfacer"}}) {
      const int ranks = way.first;
      SCOPED_TRACE(path + " over " + std::to_string(ranks) + " ranks, " + way.second);
      const EngineOptions options = options_for(path, ranks, "", way.second);
      const dist::ScheduleKind kind = dist::schedule_kind(way.second).value();
      std::vector<uint64_t> planned(static_cast<size_t>(ranks));
      // Received by each rank over its whole life, with the second step or without.
      const auto received = [&](bool second) {
        std::vector<dist::Watch> watches(planned.size());
        const auto watched = [&](std::unique_ptr<dist::Communicator> group) {
          dist::Watch& watch = watches[static_cast<size_t>(group->rank())];
          return dist::make_watched(std::move(group), watch);
        };
        with_ranks(
            ranks, {options},
            [&](std::shared_ptr<dist::Communicator> group) {
              const auto runtime = open(options, std::move(group));
              kv::Sequence sequence = runtime->make_sequence();
              const StepInput first{.sequence = &sequence,
                                    .tokens = std::span(tokens).first(kFirst),
                                    .want = StepInput::Want::kNone};
              runtime->step({&first, 1});
              if (!second) return;
              const std::span<const int32_t> rows = std::span(tokens).last(kRows);
              const StepInput input{.sequence = &sequence, .tokens = rows, .want = StepInput::Want::kLast};
              runtime->step({&input, 1});
              SequenceSlice slice{.num_tokens = kRows, .context_len = kFirst};
              slice.tables.fill(any_table.data());
              const int32_t last_row = kRows - 1;
              std::vector<std::byte> order;
              pack({.tokens = rows, .sequences = {&slice, 1}, .logit_rows = {&last_row, 1}}, runtime->spec(),
                   order);
              const PromptStepPlan plan = plan_prompt_step(runtime->spec(), ranks, kind, kFirst, kRows, true);
              for (size_t r = 0; r < planned.size(); ++r) {  // to compute, and to hand over the logits
                planned[r] = plan.received[r] + (r == 0 ? 0 : 2 * sizeof(RankMessage) + order.size());
              }
            },
            watched);
        std::vector<uint64_t> bytes;
        for (const dist::Watch& watch : watches) {
          bytes.push_back(0);
          for (const auto& from : watch.received) bytes.back() += from;
        }
        return bytes;
      };
      const std::vector<uint64_t> both = received(true), one = received(false);
      for (size_t r = 0; r < planned.size(); ++r) EXPECT_EQ(both[r] - one[r], planned[r]) << "rank " << r;
    }
  }
}

TEST(ContextRanks, OptionsThatMakeNoSense) {
  const auto error_of = [](const EngineOptions& options) -> std::string {
    try {
      open(options);
    } catch (const Error& e) {
      return e.what();
    }
    return "nothing";
  };
  EngineOptions options = options_for(test::kLlamaModel, 17);
  EXPECT_EQ(error_of(options), "context_parallel: found 17, expected 1 to 16");
  options = options_for(test::kLlamaModel, 2);
  options.tensor_parallel = 2;
  EXPECT_EQ(error_of(options), "context_parallel: found 2 with tensor_parallel 2, expected one of both");
  options.tensor_parallel = 1;
  options.context_schedule = "star";
  EXPECT_EQ(error_of(options), "context_schedule: found 'star', expected auto, ring, mesh or wallfacer");
  options.context_schedule = "mesh";
  options.context_parallel = 1;
  EXPECT_EQ(error_of(options),
            "context_schedule: found mesh with context_parallel 1, expected ranks that share contexts");
  options = options_for(test::kLlamaModel, 2);
  options.rank_speeds = "1,2";
  EXPECT_EQ(error_of(options),
            "rank_speeds: found context_parallel 2, expected none: ranks of a context are alike");
  options = options_for(test::kStateModel, 2);
  EXPECT_EQ(error_of(options),
            "context_parallel: qwen3next has layers with a state, expected attention over keys and values of "
            "the tokens before");
}

}  // namespace
}  // namespace millrace
