// One model over ranks that are threads of this process: the bits of one process, for every tiny golden model
// and for any number of ranks, however prompts are cut, whoever else runs, and wherever KV blocks go.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>

#include "base/error.h"
#include "engine/random_schedules.h"
#include "engine/rank_group.h"
#include "engine/runtime.h"
#include "engine/test_harness.h"
#include "tests/dist/rank_options.h"
#include "tests/dist/with_ranks.h"
#include "tests/golden_reader.h"
#include "tests/prompt_logits.h"

namespace millrace {
namespace {

using test::kRows;
using test::open;
using test::options_for;
using test::with_ranks;

std::vector<int32_t> greedy(Runtime& runtime, std::span<const int32_t> prompt) {
  kv::Sequence sequence = runtime.make_sequence();
  runtime.prefill(sequence, prompt.first(prompt.size() - 1));
  std::vector<int32_t> tokens(8);
  runtime.generate_greedy(sequence, prompt.back(), tokens);
  return tokens;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Expected {
  std::vector<float> logits;
  std::vector<int32_t> greedy;
};

Expected alone(const std::string& path, std::span<const int32_t> tokens, const std::string& kv_type = "",
               const std::string& device = "cpu") {
  const auto runtime = open(options_for(path, 1, "", kv_type, device));
  return {all_logits(*runtime, tokens, kRows), greedy(*runtime, tokens)};
}

void expect_same(const std::string& path, std::span<const int32_t> tokens, const Expected& expected,
                 int ranks, const std::string& speeds = "", const std::string& kv_type = "",
                 bool whole_experts = false, const std::string& device = "cpu") {
  SCOPED_TRACE(path + " over " + std::to_string(ranks) + " ranks " + speeds +
               (whole_experts ? " of whole experts" : ""));
  EngineOptions options = options_for(path, ranks, speeds, kv_type, device);
  options.expert_parallel = whole_experts;
  with_ranks(ranks, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    const auto runtime = open(options, std::move(group));
    EXPECT_TRUE(same_bits(all_logits(*runtime, tokens, kRows), expected.logits));
    EXPECT_TRUE(same_bits(all_logits(*runtime, tokens, 7), expected.logits));
    EXPECT_EQ(greedy(*runtime, tokens), expected.greedy);
  });
}

std::span<const int32_t> prompt_of(const golden::Model& model) {
  const std::span<const int32_t> all = model.prompts.front().tokens;
  return all.first(std::min<size_t>(all.size(), 40));
}

// The same over stages of a pipeline.
void expect_same_in_stages(const std::string& path, std::span<const int32_t> tokens, const Expected& expected,
                           int stages, const std::string& device = "cpu") {
  SCOPED_TRACE(path + " over " + std::to_string(stages) + " stages");
  EngineOptions options = options_for(path, 1, "", "", device);
  options.pipeline_parallel = stages;
  with_ranks(stages, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    const auto runtime = open(options, std::move(group));
    EXPECT_TRUE(same_bits(all_logits(*runtime, tokens, kRows), expected.logits));
    EXPECT_TRUE(same_bits(all_logits(*runtime, tokens, 7), expected.logits));
    EXPECT_EQ(greedy(*runtime, tokens), expected.greedy);
  });
}

// The same over stages of so many ranks each.
void expect_same_in_grid(const std::string& path, std::span<const int32_t> tokens, const Expected& expected,
                         int stages, int tensor, bool whole_experts = false, const std::string& speeds = "",
                         const std::string& device = "cpu") {
  SCOPED_TRACE(fmt::format("{} over {} stages of {} ranks {}{}", path, stages, tensor, speeds,
                           whole_experts ? " of whole experts" : ""));
  EngineOptions options = options_for(path, tensor, speeds, "", device);
  options.pipeline_parallel = stages;
  options.expert_parallel = whole_experts;
  with_ranks(stages * tensor, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    const auto runtime = open(options, std::move(group));
    EXPECT_TRUE(same_bits(all_logits(*runtime, tokens, kRows), expected.logits));
    EXPECT_TRUE(same_bits(all_logits(*runtime, tokens, 7), expected.logits));
    EXPECT_EQ(greedy(*runtime, tokens), expected.greedy);
  });
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing";
}

class AnyNumberOfRanks : public testing::TestWithParam<std::string> {};

TEST_P(AnyNumberOfRanks, HasTheBitsOfOneProcess) {
  const golden::Model model = golden::load_model(GetParam());
  const std::string& path = model.paths.back();
  const Expected expected = alone(path, prompt_of(model));
  for (const int ranks : {1, 2, 3, 4, 8, 16}) expect_same(path, prompt_of(model), expected, ranks);
  expect_same(path, prompt_of(model), expected, 2, "3,1");
  expect_same(path, prompt_of(model), expected, 3, "1,20,1");
}

INSTANTIATE_TEST_SUITE_P(Models, AnyNumberOfRanks,
                         testing::Values("llama3", "gpt-oss-w32", "qwen3moe", "qwen2moe", "gemma2"));

// Whole experts in each rank: the same bits, also where a rank has none or nearly all of them.
TEST(ExpertParallel, HasTheBitsOfOneProcess) {
  for (const char* name : {"gpt-oss-w32", "qwen3moe", "qwen2moe"}) {
    const golden::Model model = golden::load_model(name);
    const std::string& path = model.paths.back();
    const Expected expected = alone(path, prompt_of(model));
    for (const int ranks : {2, 4, 16}) expect_same(path, prompt_of(model), expected, ranks, "", "", true);
    expect_same(path, prompt_of(model), expected, 3, "1,20,1", "", true);
  }
}

TEST(Ranks, MeasuredSpeedsHaveTheBitsOfOneProcess) {
  const golden::Model model = golden::load_model("llama3");
  const std::string& path = model.paths.back();
  expect_same(path, prompt_of(model), alone(path, prompt_of(model)), 2, "auto");
}

// Not only alike: right. The oracle is what transformers recorded; half of the rows are within what 8-bit
// activations and a BF16 cache cost (golden_test.cpp has the derivation).
TEST_P(AnyNumberOfRanks, AgreesWithTransformers) {
  const golden::Model model = golden::load_model(GetParam());
  const golden::Prompt& prompt = model.prompts.front();
  const EngineOptions options = options_for(model.paths.back(), 3);
  const auto vocab = static_cast<size_t>(model.vocab_size);
  with_ranks(3, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    const auto runtime = open(options, std::move(group));
    const std::vector<float> logits = all_logits(*runtime, prompt.tokens, kRows);
    std::vector<double> errors;
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      const auto row = std::span(logits).subspan(static_cast<size_t>(prompt.positions[i]) * vocab, vocab);
      errors.push_back(golden::relative_error(row, prompt.row(i)));
    }
    std::sort(errors.begin(), errors.end());
    ASSERT_FALSE(errors.empty());
    EXPECT_LT(errors[errors.size() / 2], 0.06);
  });
}

// Not to be shared by rows: norms over all heads; latent attention; layers with a state; heads of several
// sizes and inputs of layers.
const std::set<std::string>& refused_by_rows() {
  static const std::set<std::string> refused = {
      "olmo2",      "deepseek2",   "deepseek32",     "mistral4",      "qwen3next", "qwen35",
      "qwen35moe",  "lfm2",        "lfm2moe",        "granitehybrid", "mamba2",    "falcon-h1",
      "nemotron_h", "kimi-linear", "nemotron_h_moe", "rwkv7",         "gemma4"};
  return refused;
}

// Every other model, in every format it comes in: the same bits over three ranks, or a refusal in one line.
TEST(Ranks, EveryArchitectureWorksOrIsRefused) {
  const std::set<std::string>& refused = refused_by_rows();
  size_t worked = 0, by_experts = 0, in_grid = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/golden/models")) {
    const std::string name = entry.path().filename().string();
    const golden::Model model = golden::load_model(name);
    for (const std::string& path : model.paths) {
      const Expected expected = alone(path, prompt_of(model));
      if (refused.contains(model.architecture)) {
        EXPECT_THROW(expect_same(path, prompt_of(model), expected, 3), Error) << path;
      } else {
        expect_same(path, prompt_of(model), expected, 3);
      }
      // With whole experts also those whose attention ranks cannot share.
      if (model.architecture != "gemma4" && read_config(io::Checkpoint::open(path)).experts > 0) {
        expect_same(path, prompt_of(model), expected, 3, "", "", true);
        ++by_experts;
      }
      const int layers = read_config(io::Checkpoint::open(path)).layers;
      if (model.architecture == "rwkv7") {  // its layers read values of the first one
        EXPECT_THROW(expect_same_in_stages(path, prompt_of(model), expected, std::min(layers, 3)), Error);
      } else if (model.architecture == "gemma4") {  // a layer reads what another stage would have
        EXPECT_THROW(expect_same_in_stages(path, prompt_of(model), expected, 2), Error) << path;
      } else if (layers > 1) {
        expect_same_in_stages(path, prompt_of(model), expected, std::min(layers, 3));
        // Whatever works both ways works both ways together.
        const bool by_rows = !refused.contains(model.architecture);
        if (by_rows || read_config(io::Checkpoint::open(path)).experts > 0) {
          expect_same_in_grid(path, prompt_of(model), expected, 2, 2, !by_rows);
          ++in_grid;
        }
      }
      ++worked;
    }
  }
  EXPECT_GT(worked, 30u);
  EXPECT_GT(by_experts, 15u);
  EXPECT_GT(in_grid, 30u);
}

std::vector<int32_t> long_prompt(int32_t tokens) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < tokens; ++i) prompt.push_back(3 + i * i % 240);
  return prompt;
}

// A prompt of several micro-batches, which of layers with a state is one.
TEST(Ranks, StagesTakeLongPrompts) {
  for (const std::string& path : {test::kLlamaModel, test::kStateModel}) {
    for (const int32_t tokens : {70, 200}) {
      const std::vector<int32_t> prompt = long_prompt(tokens);
      expect_same_in_stages(path, prompt, alone(path, prompt), 2);
    }
  }
}

TEST(Ranks, StagesOfRanksHaveTheBitsOfOneProcess) {
  for (const char* name : {"llama3", "gpt-oss-w32", "gemma2"}) {
    const golden::Model model = golden::load_model(name);
    const std::string& path = model.paths.back();
    const Expected expected = alone(path, prompt_of(model));
    expect_same_in_grid(path, prompt_of(model), expected, 2, 3);
    expect_same_in_grid(path, prompt_of(model), expected, 2, 8);
    expect_same_in_grid(path, prompt_of(model), expected, 2, 2, false, "1,2,3,1");
    const std::vector<int32_t> prompt = long_prompt(200);  // in micro-batches
    expect_same_in_grid(path, prompt, alone(path, prompt), 2, 2);
  }
}

// Adapters: of every product of every model they are recorded of, over ranks, stages and both; the bits of
// one process, which golden's tests compare with peft.
TEST(Ranks, AdaptersHaveTheBitsOfOneProcess) {
  constexpr std::array<std::array<int, 2>, 4> kWays = {
      {{3, 1}, {1, 2}, {2, 2}, {16, 1}}};  // tensor, pipeline
  for (const char* name : {"llama3", "llama3-patterns", "phi3", "gpt2", "gemma3", "granite", "qwen2moe",
                           "llama2-output", "mixtral-experts", "gpt-oss-experts", "qwen3moe-experts"}) {
    const std::string folder = golden::kRoot + "adapters/" + name + "/";
    const std::string model = golden::read_json(folder + "golden.json").at("model");
    const std::string path = golden::kRoot + "models/" + model + "/hf";
    const std::vector<int32_t> prompt = long_prompt(40);
    EngineOptions options = options_for(path, 1);
    options.adapters = {"a=" + folder + "peft"};
    const auto logits = [&](std::shared_ptr<dist::Communicator> group, bool adapted) {
      RuntimeSetup setup{.sequences = 1, .logit_rows = kRows};
      setup.adapter = adapted ? 0 : -1;
      setup.group = std::move(group);
      const auto runtime = Runtime::open(options, setup);
      return all_logits(*runtime, prompt, 7);
    };
    const std::vector<float> expected = logits(nullptr, true);
    EXPECT_FALSE(same_bits(expected, logits(nullptr, false))) << name;
    for (const auto& [tensor, pipeline] : kWays) {
      SCOPED_TRACE(fmt::format("{} over {} ranks, {} stages", name, tensor, pipeline));
      options.tensor_parallel = tensor;
      options.pipeline_parallel = pipeline;
      with_ranks(tensor * pipeline, {options}, [&](std::shared_ptr<dist::Communicator> group) {
        EXPECT_TRUE(same_bits(logits(std::move(group), true), expected));
      });
      options.tensor_parallel = options.pipeline_parallel = 1;
    }
  }
}

TEST(Ranks, AdaptersThatMakeNoSense) {
  const std::string folder = golden::kRoot + "adapters/";
  EngineOptions options = options_for(golden::kRoot + "models/qwen3moe/hf", 2);
  options.adapters = {"a=" + folder + "qwen3moe-experts/peft"};
  options.expert_parallel = true;
  EXPECT_NE(error_of([&] { open(options); }).find("adapter of experts"), std::string::npos);
  options = options_for(golden::kRoot + "models/llama3/hf", 2);
  options.adapters = {"a=" + folder + "llama3/peft"};
  EngineOptions other = options;
  other.adapters = {"a=" + folder + "llama3-patterns/peft"};
  const std::string refused = error_of([&] {
    with_ranks(2, {options, other},
               [&](std::shared_ptr<dist::Communicator> group) { open(options, std::move(group)); });
  });
  EXPECT_NE(refused.find("--adapter: rank 1 of 2 has '"), std::string::npos) << refused;
}

// In bulk: other numbers of ranks, also more than there are heads or experts; two for each model, in turn.
TEST(Ranks, EveryModelOverAnyNumber) {
  constexpr std::array<std::array<int, 2>, 2> kNumbers = {{{2, 16}, {4, 8}}};
  size_t worked = 0, index = 0;
  for (const std::string& name : golden::model_names()) {
    const golden::Model model = golden::load_model(name);
    const std::string& path = model.paths.back();
    const Expected expected = alone(path, prompt_of(model));
    const bool by_rows = !refused_by_rows().contains(model.architecture);
    const bool by_experts =
        model.architecture != "gemma4" && read_config(io::Checkpoint::open(path)).experts > 0;
    for (const int ranks : kNumbers[index++ % 2]) {
      if (by_rows) expect_same(path, prompt_of(model), expected, ranks);
      if (by_experts) expect_same(path, prompt_of(model), expected, ranks, "", "", true);
      worked += by_rows || by_experts;
    }
    const ModelConfig config = read_config(io::Checkpoint::open(path));
    if (config.state.wkv7 || model.architecture == "gemma4") continue;
    const std::vector<int32_t> prompt = long_prompt(150);
    if (config.layers > 1) expect_same_in_stages(path, prompt, alone(path, prompt), 2);
  }
  EXPECT_GT(worked, 60u);
}

TEST(ExpertParallel, WhatMakesNoSense) {
  EngineOptions options = options_for(test::kLlamaModel, 2);
  options.expert_parallel = true;
  EXPECT_EQ(error_of([&] { open(options); }),
            "expert_parallel: llama has no experts, expected a model that has");
  options.tensor_parallel = 1;
  EXPECT_EQ(error_of([&] { open(options); }),
            "expert_parallel: found tensor_parallel 1, expected ranks that share the experts");
}

TEST(Ranks, EveryTypeOfCache) {
  const golden::Model model = golden::load_model("llama3");
  for (const char* type : {"f32", "f16", "fp8"}) {
    expect_same(model.paths.back(), prompt_of(model), alone(model.paths.back(), prompt_of(model), type), 3,
                "", type);
  }
  const golden::Model wide = golden::load_model("qwen3");  // int8: in blocks of 32 values
  const std::string& path = wide.paths.back();
  for (const int ranks : {2, 3}) {
    expect_same(path, prompt_of(wide), alone(path, prompt_of(wide), "int8"), ranks, "", "int8");
  }
}

// A block is put together from all ranks' heads, each byte once, wherever a device keeps the scales of fp8.
TEST(Ranks, PiecesOfABlockCoverIt) {
  ExecutorSpec spec;
  spec.heads = 10;
  spec.kv_heads = 5;
  spec.head_dim = 8;
  spec.kv_type = DType::kF8E4M3;
  spec.kv_groups.resize(1);
  spec.kv_groups[0].num_layers = 2;
  spec.layers = {{0, 0}, {0, 1}};
  for (const size_t key_head : {size_t{16 * 9}, size_t{16 * 10}}) {
    std::vector<int> seen(spec.kv_block_bytes(0));
    for (int r = 0; r < 3; ++r) {
      const BlockPart part = block_part(spec, dist::Shares::even(r, 3), r, 0, key_head);
      size_t next = 0;
      for_each_piece(spec, part, [&](size_t whole_at, size_t part_at, size_t bytes) {
        EXPECT_EQ(part_at, next);
        next += bytes;
        for (size_t i = 0; i < bytes; ++i) ++seen.at(whole_at + i);
      });
      EXPECT_EQ(next, part_bytes(spec, part));
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
  }
}

// Requests that come and are cancelled, share prompts, fork, are swapped out to RAM, found on disk, computed
// again, guess ahead: the answers of each alone. Engines of random options, each with so many schedules.
void expect_random_schedules(int tensor_parallel, int pipeline_parallel, bool whole_experts = false,
                             const std::string& device = "cpu", const std::string& kv_type = "",
                             int of_each = 5) {
  constexpr int kEngines = 4;
  const int schedules = test::schedules_wanted(of_each);
  const std::vector<std::string> by_rows = {test::kLlamaModel, test::kWindowModel};
  // The second has layers with a state: every rank has all of its blocks.
  const std::vector<std::string> by_experts = {test::kWindowModel, test::kStateModel};
  test::Random random(28);
  test::Counts counts;
  std::vector<std::string> models = whole_experts ? by_experts : by_rows;
  if (pipeline_parallel > 1 && tensor_parallel == 1) models.push_back(test::kStateModel);
  for (const std::string& model : models) {
    const test::Catalogue& catalogue = test::catalogue_of(model, device, kv_type);
    const std::filesystem::path directory =
        std::filesystem::path(testing::TempDir()) / fmt::format("ranks_kv_{}", ::getpid());
    std::filesystem::remove_all(directory);
    for (int e = 0; e < kEngines; ++e) {
      EngineOptions options = test::random_options(random, model);
      options.device = device;
      options.kv_type = kv_type;
      options.threads = 1;
      options.tensor_parallel = tensor_parallel;
      options.pipeline_parallel = pipeline_parallel;
      options.expert_parallel = whole_experts;
      if (options.prefix_cache && random.chance(40)) options.kv_dir = directory.string();
      with_ranks(
          tensor_parallel * pipeline_parallel, {options}, [&](std::shared_ptr<dist::Communicator> group) {
            const auto change = [&](RuntimeSetup& setup) { setup.group = group; };
            test::Harness harness(options, test::random_pool(random, model == test::kLlamaModel ? 1 : 2),
                                  nullptr, change);
            group.reset();
            for (int s = 0; s < schedules; ++s) {
              test::run_schedule(harness, catalogue, random, counts);
              ASSERT_FALSE(testing::Test::HasFatalFailure()) << model << " engine " << e << " schedule " << s;
            }
            counts.hits += harness.runtime->cache().stats().hit_tokens;
          });
      if (testing::Test::HasFatalFailure()) return;
    }
    std::filesystem::remove_all(directory);
  }
  std::printf(
      "[  figure  ] %lu schedules: %lu samples compared, %lu cancelled, %lu swaps, %lu recomputations\n",
      counts.schedules, counts.finished, counts.cancelled, counts.swaps, counts.recomputes);
  EXPECT_GT(counts.hits, 0u);
  EXPECT_GT(counts.forked, 0u);
  EXPECT_GT(counts.embeddings, 0u);
  EXPECT_GT(counts.logprobs, 0u);
  EXPECT_GT(counts.swaps + counts.recomputes, 0u);
  // Candidates are enough for most steps; stages have no parts of the vocabulary.
  EXPECT_EQ(counts.picked_by_ranks > 0, tensor_parallel > 1 && pipeline_parallel == 1);
}

// Drawn tokens without logits on the way: what rank 0 receives in a step is no row of them.
TEST(Ranks, DrawnTokensMoveCandidates) {
  Request request;
  for (int i = 0; i < 20; ++i) request.tokens.push_back(3 + i * 11 % 240);
  request.max_tokens = 12;
  request.ignore_end = true;
  request.sampling = {.temperature = 0.9f, .top_k = 20, .top_p = 0.95f, .min_p = 0.01f};
  request.sampling.seed = 17;
  request.sampling.presence_penalty = 0.4f;
  const auto expected = test::run_alone(test::kLlamaModel, request);
  EngineOptions options = options_for(test::kLlamaModel, 3);
  options.context = 128;
  with_ranks(3, {options}, [&](std::shared_ptr<dist::Communicator> group) {
    test::Harness harness(options, {}, nullptr, [&](RuntimeSetup& setup) { setup.group = group; });
    group.reset();
    harness.submit(request);
    harness.run();
    EXPECT_EQ(harness.answers[0][0].tokens, expected[0].tokens);
    EXPECT_EQ(harness.recorder->rows_picked_by_ranks.load(), 12u);
    EXPECT_EQ(harness.recorder->rows_gathered.load(), 0u);
  });
}

TEST(Ranks, RandomSchedulesOverThreeRanks) { expect_random_schedules(3, 1); }
// In bulk: of each of eight engines so many.
TEST(Ranks, AThousandSchedulesOverThreeRanks) { expect_random_schedules(3, 1, false, "cpu", "", 125); }
TEST(ExpertParallel, RandomSchedulesOverTwoRanks) { expect_random_schedules(2, 1, true); }
TEST(Ranks, RandomSchedulesOverTwoStages) { expect_random_schedules(1, 2); }
TEST(Ranks, RandomSchedulesOverTwoStagesOfTwo) { expect_random_schedules(2, 2, false, "cpu", "", 3); }

// ---------------------------------------------------------------- ranks with GPUs (MILLRACE_TEST_DEVICES)

std::string gpu_under_test() {
  for (const std::string& name : golden::device_names()) {
    if (name.starts_with("cuda")) return name;
  }
  return "";
}
// None without a GPU: a line of GpuRanks says so once, and not for each of them.
std::vector<std::string> models_for_gpus() {
  return gpu_under_test().empty() ? std::vector<std::string>() : golden::model_names();
}

// All of them on one GPU, where there is one: threads of this process, with an executor each.
class RanksOnGpus : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (device_.empty()) GTEST_SKIP() << "*** MILLRACE_TEST_DEVICES names no GPU: its ranks did not run ***";
  }
  const std::string device_ = gpu_under_test();
};

TEST_P(RanksOnGpus, HaveTheBitsOfOneProcessOrAreRefused) {
  const golden::Model model = golden::load_model(GetParam());
  const std::string& path = model.paths.back();
  const std::span<const int32_t> prompt = prompt_of(model);
  Expected expected;
  try {
    expected = alone(path, prompt, "", device_);
  } catch (const Error& error) {  // what a GPU does not do
    ASSERT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_THROW(expect_same(path, prompt, expected, 2, "", "", false, device_), Error) << error.what();
    return;
  }
  const ModelConfig config = read_config(io::Checkpoint::open(path));
  if (refused_by_rows().contains(model.architecture)) {
    EXPECT_THROW(expect_same(path, prompt, expected, 2, "", "", false, device_), Error) << path;
  } else {
    for (const int ranks : {2, 3}) expect_same(path, prompt, expected, ranks, "", "", false, device_);
  }
  // Of those that rows are not shared of, some have what only one GPU does.
  const auto expect_or_refused = [&](const std::function<void()>& body) {
    if (!refused_by_rows().contains(model.architecture)) return body();
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    }
  };
  if (config.experts > 0) {
    expect_or_refused([&] {
      for (const int ranks : {2, 3}) expect_same(path, prompt, expected, ranks, "", "", true, device_);
    });
  }
  if (config.layers == 1 || config.state.wkv7) return;
  expect_or_refused(
      [&] { expect_same_in_stages(path, prompt, expected, std::min(config.layers, 3), device_); });
  const bool by_rows = !refused_by_rows().contains(model.architecture);
  if (!by_rows && config.experts == 0) return;
  expect_or_refused([&] { expect_same_in_grid(path, prompt, expected, 2, 2, !by_rows, "", device_); });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RanksOnGpus);
INSTANTIATE_TEST_SUITE_P(Models, RanksOnGpus, testing::ValuesIn(models_for_gpus()), [](const auto& param) {
  std::string name = param.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
});

class GpuRanks : public RanksOnGpus {};  // what is not of one model

TEST_P(GpuRanks, OfAnyNumberAndAnyShares) {
  for (const char* name : {"llama3", "gpt-oss-w32", "qwen2moe"}) {
    const golden::Model model = golden::load_model(name);
    const std::string& path = model.paths.back();
    const Expected expected = alone(path, prompt_of(model), "", device_);
    for (const int ranks : {1, 4, 8})
      expect_same(path, prompt_of(model), expected, ranks, "", "", false, device_);
    expect_same(path, prompt_of(model), expected, 3, "1,20,1", "", false, device_);
    if (std::string_view(name) == "llama3") continue;
    expect_same(path, prompt_of(model), expected, 4, "", "", true, device_);
    const std::string refused =
        error_of([&] { expect_same(path, prompt_of(model), expected, 8, "", "", true, device_); });
    EXPECT_NE(refused.find("would have none of the"), std::string::npos) << refused;
  }
}

TEST_P(GpuRanks, WithEveryTypeOfCache) {
  const golden::Model model = golden::load_model("llama3");
  const std::string& path = model.paths.back();
  for (const char* type : {"f32", "f16", "fp8"}) {
    expect_same(path, prompt_of(model), alone(path, prompt_of(model), type, device_), 3, "", type, false,
                device_);
  }
}

TEST_P(GpuRanks, RandomSchedules) {
  expect_random_schedules(3, 1, false, device_);
  expect_random_schedules(2, 1, false, device_, "fp8");
  expect_random_schedules(2, 1, true, device_);
  expect_random_schedules(1, 2, false, device_);
  expect_random_schedules(2, 2, false, device_, "", 2);
}

// Processes of the program, by a front as `millrace serve` is one: it plans memory for a rank, they compute.
TEST_P(GpuRanks, ThatAFrontStarts) {
  if (std::system("command -v mpirun >/dev/null && command -v millrace >/dev/null") != 0) {
    GTEST_SKIP() << "*** mpirun or millrace is not in PATH: a front with GPUs was not tested ***";
  }
  Request request;
  for (int i = 0; i < 20; ++i) request.tokens.push_back(3 + i * 11 % 240);
  request.max_tokens = 12;
  request.ignore_end = true;
  request.sampling = {.temperature = 0.9f, .top_k = 20};
  request.sampling.seed = 17;
  const auto expected = test::run_alone(test::kLlamaModel, request, 1, device_);
  for (const bool stages : {false, true}) {
    EngineOptions options = options_for(test::kLlamaModel, stages ? 1 : 2, "", "", device_);
    options.pipeline_parallel = stages ? 2 : 1;
    options.context = 128;
    options.kv_tokens = 2048;
    options.launcher = "mpirun";
    test::Harness harness(options);
    harness.submit(request);
    harness.run();
    EXPECT_EQ(harness.answers[0][0].error, "");
    EXPECT_EQ(harness.answers[0][0].tokens, expected[0].tokens) << (stages ? "stages" : "rows");
  }
}

TEST_P(GpuRanks, ContextsAreRefusedInALine) {
  EngineOptions options = options_for(test::kLlamaModel, 1, "", "", device_);
  options.context_parallel = 2;
  const std::string refused = error_of([&] {
    with_ranks(2, {options},
               [&](std::shared_ptr<dist::Communicator> group) { open(options, std::move(group)); });
  });
  EXPECT_NE(refused.find("ranks that share contexts"), std::string::npos) << refused;
}

INSTANTIATE_TEST_SUITE_P(OneGpu, GpuRanks, testing::Values(""));

// What encoders make of a text, over ranks that share rows.
TEST(Ranks, EncodersHaveTheBitsOfOneProcess) {
  for (const char* name : {"bert", "modernbert"}) {
    const std::string path = golden::kRoot + "encoders/" + name + "/hf";
    Request request;
    for (int i = 0; i < 30; ++i) request.tokens.push_back(5 + i * 7 % 90);
    request.embedding = Pooling::kMean;
    const auto expected = test::run_alone(path, request);
    ASSERT_GT(expected[0].embedding.size(), 0u) << path << ": " << expected[0].error;
    EngineOptions options = options_for(path, 3);
    options.context = 128;
    with_ranks(3, {options}, [&](std::shared_ptr<dist::Communicator> group) {
      test::Harness harness(options, {}, nullptr, [&](RuntimeSetup& setup) { setup.group = group; });
      group.reset();
      harness.submit(request);
      harness.run();
      EXPECT_EQ(harness.answers[0][0].embedding, expected[0].embedding) << path;
    });
    options.tensor_parallel = 1;
    options.pipeline_parallel = 2;
    const std::string refused = error_of([&] { open(options); });
    EXPECT_NE(refused.find("is a text encoder"), std::string::npos) << refused;
  }
}

TEST(Ranks, AnotherModelOrPlanIsRefusedByName) {
  const std::string llama = test::kLlamaModel, other = "tests/golden/models/qwen3/model.gguf";
  const auto run = [&](const EngineOptions& first, const EngineOptions& second) {
    return error_of([&] {
      with_ranks(2, {first, second},
                 [&](std::shared_ptr<dist::Communicator> group) { open(first, std::move(group)); });
    });
  };
  const std::string model = run(options_for(llama, 2), options_for(other, 2));
  EXPECT_NE(model.find("model: rank 1 of 2 has '"), std::string::npos) << model;
  const std::string plan = run(options_for(llama, 2), options_for(llama, 2, "1,2"));
  EXPECT_EQ(plan, "--rank-speeds: rank 1 of 2 has '1,2', rank 0 has '': all ranks need the same");
}

TEST(Ranks, StagesThatMakeNoSense) {
  EngineOptions options = options_for(test::kLlamaModel, 3);
  options.pipeline_parallel = 6;
  EXPECT_EQ(error_of([&] { open(options); }),
            "pipeline_parallel: found 6 with tensor_parallel 3, expected at most 16 ranks together");
  options.pipeline_parallel = 2;
  EXPECT_EQ(error_of([&] { open(options); }),
            "--tensor-parallel 3 --pipeline-parallel 2: found one process, expected 6: start it with mpirun "
            "-n 6");
  options.tensor_parallel = 1;
  options.pipeline_parallel = 16;
  const std::string layers = error_of([&] { open(options); });
  EXPECT_NE(layers.find("would have none of the model's"), std::string::npos) << layers;
}

TEST(Ranks, OptionsThatMakeNoSense) {
  EngineOptions options = options_for(test::kLlamaModel, 17);
  EXPECT_EQ(error_of([&] { open(options); }), "tensor_parallel: found 17, expected 1 to 16");
  options = options_for(test::kLlamaModel, 2, "1,x");
  EXPECT_EQ(error_of([&] { open(options); }),
            "rank_speeds: found \"1,x\", expected auto, or numbers above 0 with commas between them");
  options = options_for(test::kLlamaModel, 2, "1,2,3");
  EXPECT_EQ(error_of([&] { open(options); }), "rank_speeds: found 3 numbers, expected 2, one for each rank");
  options = options_for(test::kLlamaModel, 2);
  options.quantize = "q8_0";
  EXPECT_NE(error_of([&] { open(options); }).find("quantize: found tensor_parallel 2"), std::string::npos);
  options = options_for(test::kLlamaModel, 2);
  options.device = "reference";
  const std::string refused = error_of([&] {
    with_ranks(2, {options},
               [&](std::shared_ptr<dist::Communicator> group) { open(options, std::move(group)); });
  });
  EXPECT_NE(refused.find("device reference: found 2 ranks"), std::string::npos) << refused;
  options = options_for(golden::kRoot + "models/olmo2/hf", 2);
  const std::string norms = error_of([&] {
    with_ranks(2, {options},
               [&](std::shared_ptr<dist::Communicator> group) { open(options, std::move(group)); });
  });
  EXPECT_NE(
      norms.find("needs what ranks with the device cpu do not do yet: a norm over all heads; expected one "
                 "process, or --pipeline-parallel"),
      std::string::npos)
      << norms;
}

}  // namespace
}  // namespace millrace
