// A model over two devices: any two, so that a GPU with a CPU beside it is tested without one. Against what
// transformers recorded; the same bits however the prompt is cut; the plan against what it says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "engine/memory_plan.h"
#include "engine/open_backend.h"
#include "engine/runtime.h"
#include "engine/split_model.h"
#include "golden_reader.h"
#include "io/imatrix.h"
#include "io/test_files.h"
#include "prompt_logits.h"

namespace millrace::split_test {
namespace {

using golden::Prompt;

EngineOptions options_of(const std::string& path, const std::string& device) {
  return {
      .model = path, .device = device, .threads = 2, .context = 512, .kv_type = "f32", .step_tokens = 512};
}

std::unique_ptr<Runtime> open(const EngineOptions& options) {
  return Runtime::open(options, {.sequences = 4, .logit_rows = 512});
}

struct Case {
  std::string device;
  int32_t gpu_layers;
  std::string cpu_experts;
};

std::string words_of(const Case& c) {
  return fmt::format("{}, {} layers, experts {}", c.device, c.gpu_layers, c.cpu_experts);
}

// Where MILLRACE_TEST_DEVICES names a GPU, with it in the place of the first device too.
std::vector<Case> with_gpu(std::vector<Case> cases) {
  const char* devices = std::getenv("MILLRACE_TEST_DEVICES");
  if (devices == nullptr || std::string_view(devices).find("cuda") == std::string_view::npos) return cases;
  const size_t count = cases.size();
  for (size_t i = 0; i < count; ++i) cases.push_back({"cuda+cpu", cases[i].gpu_layers, cases[i].cpu_experts});
  return cases;
}

// A GPU may lack an operation of the model's.
std::unique_ptr<Runtime> open_unless_refused(const EngineOptions& options) {
  try {
    return open(options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported || !options.device.starts_with("cuda")) throw;
    std::printf("[  figure  ] %s\n", error.what());
    return nullptr;
  }
}

// Against transformers, with the bound of one device (golden_test.cpp has the derivation).
void expect_golden(const std::string& model_name, const std::vector<Case>& cases) {
  const golden::Model model = golden::load_model(model_name);
  const auto vocab = static_cast<size_t>(model.vocab_size);
  const Prompt& prompt = model.prompts.front();
  size_t count = 0;
  for (const Case& c : with_gpu(cases)) {
    const size_t number = count++;
    const std::string& path = model.paths[number % model.paths.size()];
    SCOPED_TRACE(words_of(c) + " " + path);
    EngineOptions options = options_of(path, c.device);
    options.gpu_layers = c.gpu_layers;
    options.cpu_experts = c.cpu_experts;
    const auto runtime = open_unless_refused(options);
    if (runtime == nullptr) continue;
    const std::vector<float> logits = all_logits(*runtime, prompt.tokens, 512);
    std::vector<double> errors;
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      errors.push_back(golden::relative_error(std::span(logits).subspan(prompt.positions[i] * vocab, vocab),
                                              prompt.row(i)));
    }
    std::sort(errors.begin(), errors.end());
    const double allowed = 3 * 0.005 * std::sqrt(5.0 * runtime->config().layers + 1);
    EXPECT_LT(errors[errors.size() / 2], allowed);
    EXPECT_LT(errors.back(), std::max(0.5, 3 * allowed));
    std::printf("[  figure  ] %-60s median %.1e worst %.1e\n", words_of(c).c_str(), errors[errors.size() / 2],
                errors.back());
    EXPECT_EQ(all_logits(*runtime, prompt.tokens, 7), logits) << "in pieces of 7";
    EXPECT_EQ(all_logits(*runtime, std::span(prompt.tokens).first(20), 1),
              std::vector<float>(logits.begin(), logits.begin() + static_cast<ptrdiff_t>(20 * vocab)))
        << "token by token";
  }
}

TEST(Split, ExpertsOfGptOssAgreeWithTransformers) {
  expect_golden("gpt-oss-w32", {{"cpu+reference", -1, "3"},
                                {"reference+cpu", -1, "all"},
                                {"cpu+reference", 1, "0,2"},  // that do not follow one another
                                {"reference+cpu", 1, "1-2"},
                                {"reference+cpu", 0, ""}});
}

// A shared expert is the first device's, also where it has no others.
TEST(Split, SharedExpertsAgreeWithTransformers) {
  expect_golden("qwen2moe", {{"cpu+reference", -1, "all"}, {"reference+cpu", -1, "2"}});
}

// Weights multiply what goes in; sigmoid routing; layers without experts before those with.
TEST(Split, OtherRoutersAgreeWithTransformers) {
  expect_golden("llama4", {{"reference+cpu", -1, "1"}});
  expect_golden("deepseek-v3", {{"cpu+reference", -1, "3"}});
}

// Dense layers, positions that are learned, and states that blocks hold.
TEST(Split, LayersAgreeWithTransformers) {
  expect_golden("gpt2", {{"cpu+reference", 1, ""}});
  expect_golden("qwen3next", {{"reference+cpu", 2, "1"}});
  expect_golden("kimi-linear", {{"reference+cpu", 2, "1"}});  // products of products, three convolutions
}

// With every weight on one of them a split has that device's own bits.
TEST(Split, AllOnOneDeviceHasItsBits) {
  const golden::Model model = golden::load_model("gpt-oss-w32");
  const std::vector<int32_t>& tokens = model.prompts.front().tokens;
  const auto alone = open(options_of(model.paths.back(), "cpu"));
  const std::vector<float> expected = all_logits(*alone, tokens, 64);
  EngineOptions options = options_of(model.paths.back(), "cpu+reference");
  EXPECT_EQ(all_logits(*open(options), tokens, 64), expected);
}

// The last block of a sequence is both devices': copied whole, and moved to memory and back.
TEST(Split, BlocksHaveBothDevicesParts) {
  const golden::Model model = golden::load_model("gpt-oss-w32");
  EngineOptions options = options_of(model.paths.back(), "cpu+reference");
  options.gpu_layers = 1;
  const auto runtime = open(options);
  const std::vector<int32_t> tokens(model.prompts.front().tokens.begin(),
                                    model.prompts.front().tokens.begin() + 32);
  const std::vector<float> expected = all_logits(*runtime, tokens, 16);
  kv::Sequence sequence = runtime->make_sequence();
  const StepInput first{.sequence = &sequence, .tokens = std::span(tokens).first(16)};
  runtime->step({&first, 1});
  Executor& executor = runtime->executor();
  const auto groups = static_cast<int>(runtime->spec().kv_groups.size());
  for (int g = 0; g < groups; ++g) {
    const int32_t block = sequence.table(g)[0];
    std::vector<std::byte> bytes(runtime->spec().kv_block_bytes(g));
    executor.read_block(g, block, bytes);
    executor.finish_reads();
    EXPECT_GT(std::count_if(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{}; }), 0);
    const std::vector<std::byte> zeros(bytes.size());
    executor.write_block(g, block, zeros);
    executor.write_block(g, block, bytes);
    executor.copy_block(g, block, block + 1);  // nobody's yet
  }
  const StepInput second{
      .sequence = &sequence, .tokens = std::span(tokens).subspan(16), .want = StepInput::Want::kAll};
  const std::span<const float> logits = runtime->step({&second, 1});
  EXPECT_TRUE(
      std::equal(logits.begin(), logits.end(), expected.end() - static_cast<ptrdiff_t>(logits.size())));
}

// A limit in bytes: what fits is the first device's, and what it is said to hold is within the limit.
TEST(Split, MemoryDecidesWhatIsWhere) {
  const std::string path = golden::load_model("gpt-oss-w32").paths.back();
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  const ModelConfig config = read_config(checkpoint);
  const auto first = make_backend("cpu", {.threads = 1});
  const WeightSizes sizes = weight_sizes(checkpoint, config, *first);
  EngineOptions options = options_of(path, "cpu+reference");
  options.context = 64;
  options.step_tokens = 16;
  const RuntimeSetup setup{.sequences = 1};
  size_t all = sizes.output;
  for (const WeightSizes::Layer& layer : sizes.layers) all += layer.dense + layer.experts;
  const auto total = static_cast<size_t>(config.experts) * static_cast<size_t>(config.layers);
  bool some = false, none = false;
  for (size_t memory = 2 * all + (size_t{8} << 20); memory > all / 16; memory -= all / 16) {
    mixed::Placement placement;
    try {
      placement = plan_split(checkpoint, config, options, setup, *first, memory);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNoMemory);
      none = true;
      break;
    }
    size_t used = sizes.output, experts = 0;
    for (size_t l = 0; l < sizes.layers.size(); ++l) {
      const mixed::Placement::Layer& layer = placement.layers[l];
      if (layer.on_first) used += sizes.layers[l].dense;
      used += sizes.layers[l].experts / static_cast<size_t>(config.experts) * layer.first_experts.size();
      experts += layer.first_experts.size();
    }
    EXPECT_LE(used, memory);
    some = some || (experts > 0 && experts < total);
  }
  EXPECT_TRUE(some && none);
}

TEST(Split, PlanIsPlainData) {
  mixed::PlacementInput input;
  input.memory = 100;
  input.output = 10;
  input.embedding = 50;
  input.experts = 4;
  input.layers = {{10, 2, 0}, {10, 2, 20}, {10, 2, 20}};
  const mixed::Placement placement = plan_placement(input);
  // 100 - 10 - 3 * 12 = 54: all of a layer's experts, and all of the next.
  EXPECT_EQ(placement.layers_on_first(), 3);
  EXPECT_EQ(placement.layers[1].first_experts.size(), 4u);
  EXPECT_EQ(placement.layers[2].first_experts.size(), 4u);
  input.memory = 81;  // 35: three of the second
  const mixed::Placement less = plan_placement(input);
  EXPECT_EQ(less.layers[1].first_experts.size(), 4u);
  EXPECT_EQ(less.layers[2].first_experts, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_TRUE(less.shares_experts(2));
  EXPECT_FALSE(less.shares_experts(1));
  EXPECT_EQ(less.text("cuda", "cpu"),
            "the output, layers 0-2, 7 of 8 experts on cuda; the embedding, 1 of 8 experts on cpu");
  EXPECT_NE(less.identity(), placement.identity());
  input.memory = 35;  // two layers, no expert
  const mixed::Placement few = plan_placement(input);
  EXPECT_EQ(few.text("cuda", "cpu"),
            "the output, layers 1-2 on cuda; the embedding, layer 0, 8 of 8 experts on cpu");
  input.memory = 9;
  EXPECT_THROW(plan_placement(input), Error);
  input.memory = 35;
  input.first_layers = 3;
  EXPECT_THROW(plan_placement(input), Error);
}

TEST(Split, TheMostUsedExpertsAreTheFirstDevices) {
  mixed::PlacementInput input;
  input.memory = 65;
  input.experts = 4;
  input.layers = {{10, 0, 40}, {10, 0, 40}};
  input.counts = {{1, 5, 0, 2}, {100, 700, 100, 100}};  // shares of a layer: 5/8, 2/8, 1/8; 7/10, 1/10
  const mixed::Placement four = plan_placement(input);
  EXPECT_EQ(four.layers[0].first_experts, (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(four.layers[1].first_experts, (std::vector<int32_t>{1}));
  input.second_count = 3;  // said: the three least used of each
  const mixed::Placement said = plan_placement(input);
  EXPECT_EQ(said.layers[0].first_experts, (std::vector<int32_t>{1}));
  EXPECT_EQ(said.layers[1].first_experts, (std::vector<int32_t>{1}));
}

// Counts come from an importance matrix; where they put experts changes nothing but the last bits.
TEST(Split, CountsOfAnImportanceMatrixPlaceExperts) {
  const golden::Model model = golden::load_model("gpt-oss-w32");
  const io::testing::TempDir folder;
  const std::string path = folder.path() + "/counts.gguf";
  io::ImportanceMatrix matrix;
  for (int l = 0; l < 3; ++l) {
    io::ImportanceEntry& entry = matrix.entries[fmt::format("blk.{}.ffn_down_exps.weight", l)];
    entry.matrices = 4;
    entry.cols = 1;
    entry.sums = {1, 1, 1, 1};
    entry.counts = {0, 9, 1, 8};
  }
  io::write_imatrix(path, matrix);
  EngineOptions options = options_of(model.paths.back(), "reference+cpu");
  options.cpu_experts = "2";
  options.expert_counts = path;
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  const auto first = make_backend("reference", {});
  const mixed::Placement placement =
      plan_split(checkpoint, read_config(checkpoint), options, {}, *first, size_t{1} << 40);
  for (const mixed::Placement::Layer& layer : placement.layers) {
    EXPECT_EQ(layer.first_experts, (std::vector<int32_t>{1, 3}));
  }
  const auto runtime = open(options);
  const std::vector<int32_t>& tokens = model.prompts.front().tokens;
  const auto alone = open(options_of(model.paths.back(), "reference"));
  EXPECT_LT(golden::relative_error(all_logits(*runtime, tokens, 64), all_logits(*alone, tokens, 64)), 0.06);
  options.expert_counts = model.paths.back();  // no importance matrix
  EXPECT_THROW(open(options), Error);
}

TEST(Split, ExpertsAreNamedByNumberOrList) {
  const auto parsed = [](const std::string& text) {
    mixed::PlacementInput input;
    input.experts = 8;
    mixed::parse_experts("o", text, input);
    return input;
  };
  EXPECT_EQ(parsed("2").second_count, 2);
  EXPECT_EQ(parsed("0").second_count, 0);
  EXPECT_EQ(parsed("all").second_count, 8);
  EXPECT_EQ(parsed("0-2,7,1").second_experts, (std::vector<int32_t>{0, 1, 2, 7}));
  for (const char* bad : {"9", "x", "3-1", "0-8", "1,", "-", "1-", ""})
    EXPECT_THROW(parsed(bad), Error) << bad;
}

TEST(Split, WhatCannotBeSplitIsRefused) {
  const std::string path = golden::load_model("llama3").paths.back();
  const auto error_of = [&](EngineOptions options) -> std::string {
    try {
      open(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EngineOptions options = options_of(path, "cpu+reference");
  options.cpu_experts = "1";
  EXPECT_NE(error_of(options).find("has no experts"), std::string::npos);
  options.cpu_experts = "";
  options.gpu_layers = 999;
  EXPECT_NE(error_of(options).find("gpu layers: found 999"), std::string::npos);
  EXPECT_NE(error_of(options_of(path, "cpu+cpu")).find("two different ones"), std::string::npos);
  options = options_of(path, "cpu");
  options.gpu_layers = 1;
  EXPECT_NE(error_of(options).find("gpu_layers: found device cpu, expected a GPU"), std::string::npos);
}

}  // namespace
}  // namespace millrace::split_test
