// Importance matrices against hooks on transformers' modules (tests/golden/make_imatrix_golden.py), from both
// kinds of model files, on the reference and the CPU; the two forms of the file; damaged ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "backend/input_watcher.h"
#include "base/error.h"
#include "engine/input_sums.h"
#include "engine/out_tensors.h"
#include "engine/runtime.h"
#include "golden_reader.h"
#include "io/test_files.h"

namespace millrace {
namespace {

const std::string kImatrices = golden::kRoot + "imatrix/";

io::ImportanceMatrix measured_inputs(const std::string& model, const std::string& device,
                                     std::span<const int32_t> tokens, size_t chunk) {
  const auto runtime = Runtime::open(
      {.model = model, .device = device, .threads = 2, .context = 64, .kv_type = "f32", .step_tokens = 64},
      {.logit_rows = 64});
  InputSums sums(runtime->model());
  dynamic_cast<WatchableExecutor&>(runtime->executor()).watch_inputs(&sums);
  kv::Sequence sequence = runtime->make_sequence();
  for (; !tokens.empty(); tokens = tokens.subspan(std::min(chunk, tokens.size()))) {
    const StepInput input{&sequence, tokens.first(std::min(chunk, tokens.size())), StepInput::Want::kAll};
    runtime->step({&input, 1});
  }
  io::ImportanceMatrix matrix;
  matrix.entries = sums.entries();
  return matrix;
}

// Every weight of `expected` is there, by its own name or those of its parts, with these sums. ties: near one
// of two experts a row may go to the other, whose sums are not compared then.
void expect_same_sums(const io::ImportanceMatrix& found, const io::ImportanceMatrix& expected, double bound,
                      bool ties = false) {
  for (const auto& [name, entry] : expected.entries) {
    SCOPED_TRACE(name);
    auto same = found.entries.find(name);
    for (const auto& [whole, part] : {std::pair{"attn_qkv.", "attn_q."},
                                      {"ffn_up.", "ffn_gate."},
                                      {"attn_qkv.", "ssm_in."},
                                      {"attn_gate.", "ssm_in."}}) {
      if (same != found.entries.end() || name.find(whole) == std::string::npos) continue;
      std::string other = name;
      same = found.entries.find(other.replace(other.find(whole), std::string(whole).size(), part));
    }
    ASSERT_NE(same, found.entries.end());
    if (ties && entry.matrices > 1 && same->second.counts != entry.counts) continue;
    ASSERT_EQ(same->second.counts, entry.counts);
    ASSERT_EQ(same->second.cols, entry.cols);
    EXPECT_LT(golden::relative_error(same->second.sums, entry.sums), bound);
  }
}

// Columns in the order that a GGUF file of the model has them in.
io::ImportanceMatrix as_in_gguf(io::ImportanceMatrix matrix, const std::string& model) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(golden::kRoot + "models/" + model + "/hf");
  for (const auto& [name, tiles] : moved_columns(checkpoint, read_config(checkpoint))) {
    const auto found = matrix.entries.find(name);
    if (found == matrix.entries.end()) continue;  // a convolution's
    const std::vector<float> sums = found->second.sums;
    for (size_t i = 0; i < sums.size(); ++i)
      found->second.sums[i] = sums[static_cast<size_t>(tiles.source(static_cast<int64_t>(i)))];
  }
  return matrix;
}

class Imatrix : public testing::TestWithParam<std::string> {};

TEST_P(Imatrix, AgreesWithTransformers) {
  const io::ImportanceMatrix expected = io::read_imatrix(kImatrices + GetParam() + ".gguf");
  const auto tokens =
      golden::read_json(kImatrices + GetParam() + ".json").at("tokens").get<std::vector<int32_t>>();
  EXPECT_EQ(expected.chunk_tokens, std::ssize(tokens));
  for (const std::string& path : golden::load_model(GetParam()).paths) {
    SCOPED_TRACE(path);
    const io::ImportanceMatrix here = path.ends_with(".gguf") ? as_in_gguf(expected, GetParam()) : expected;
    expect_same_sums(measured_inputs(path, "reference", tokens, 64), here, 1e-5);
    // Q8_0 rounds activations on their way through the layers.
    const bool rounded = path.ends_with(".gguf");
    expect_same_sums(measured_inputs(path, "cpu", tokens, 17), here, rounded ? 0.1 : 1e-5, rounded);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Imatrix,
                         testing::Values("llama3", "phi3", "gpt2", "qwen2moe", "deepseek-v3", "deepseek-v2",
                                         "deepseek-v32", "kimi-linear", "qwen3next", "qwen35", "lfm2moe",
                                         "granitehybrid-moe", "nemotron-h-moe", "mamba2"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Whose low ranks are products too; transformers has no such model to hook.
TEST(ImatrixOfRwkv, TheCpuSeesWhatTheReferenceSees) {
  std::vector<int32_t> tokens(50);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(7 * i % 250);
  const std::string path = golden::kRoot + "models/rwkv7/hf";
  const io::ImportanceMatrix expected = measured_inputs(path, "reference", tokens, 64);
  EXPECT_TRUE(expected.entries.contains("blk.1.time_mix_v2.weight"));
  EXPECT_TRUE(expected.entries.contains("blk.0.channel_mix_key.weight"));
  expect_same_sums(measured_inputs(path, "cpu", tokens, 17), expected, 1e-5);
}

TEST(ImatrixFile, BothFormsGiveTheSameWeights) {
  const io::ImportanceMatrix now = io::read_imatrix(kImatrices + "llama3.gguf"),
                             before = io::read_imatrix(kImatrices + "llama3.dat");
  EXPECT_EQ(before.chunks, 3);
  EXPECT_EQ(before.datasets, std::vector<std::string>{"random"});
  const int64_t cols = now.entries.at("blk.1.ffn_down.weight").cols;
  const std::vector<float> a = importance_of(now, "now", "blk.1.ffn_down.weight", 1, cols),
                           b = importance_of(before, "before", "blk.1.ffn_down.weight", 1, cols);
  ASSERT_EQ(a.size(), static_cast<size_t>(cols));
  EXPECT_LT(golden::relative_error(a, b), 1e-6);
  EXPECT_TRUE(importance_of(now, "now", "blk.7.ffn_down.weight", 1, cols).empty());
  // A fused matrix has the inputs of its parts.
  const int64_t hidden = now.entries.at("blk.0.attn_q.weight").cols;
  EXPECT_EQ(importance_of(now, "now", "blk.0.attn_qkv.weight", 1, hidden),
            importance_of(now, "now", "blk.0.attn_k.weight", 1, hidden));
  EXPECT_THROW(importance_of(now, "now", "blk.0.attn_q.weight", 1, hidden + 32), Error);
}

TEST(ImatrixFile, WhatIsWrittenIsReadAgain) {
  const io::testing::TempDir folder;
  const std::string path = folder.path() + "/written.gguf";
  io::ImportanceMatrix matrix = io::read_imatrix(kImatrices + "qwen2moe.gguf");
  matrix.datasets = {"a.txt", "b.txt"};
  io::write_imatrix(path, matrix);
  const io::ImportanceMatrix again = io::read_imatrix(path);
  EXPECT_EQ(again.datasets, matrix.datasets);
  EXPECT_EQ(again.chunk_tokens, matrix.chunk_tokens);
  ASSERT_EQ(again.entries.size(), matrix.entries.size());
  for (const auto& [name, entry] : matrix.entries) {
    EXPECT_EQ(again.entries.at(name).sums, entry.sums);
    EXPECT_EQ(again.entries.at(name).counts, entry.counts);
  }
}

TEST(ImatrixFile, DamagedOnesAreRefused) {
  const io::testing::TempDir folder;
  std::vector<std::byte> bytes = golden::read_bytes(kImatrices + "llama3.dat");
  const auto write = [&](size_t count) {
    return folder.write("cut.dat", {reinterpret_cast<const char*>(bytes.data()), count});
  };
  const size_t trailer = 4 + 4 + 6;
  for (size_t cut = 0; cut < bytes.size(); cut += cut < 200 ? 1 : 97) {
    if (cut == bytes.size() - trailer) continue;  // the oldest files end so
    EXPECT_THROW(io::read_imatrix(write(cut)), Error) << cut;
  }
  bytes[7] = std::byte{0x7f};  // the length of the first name
  EXPECT_THROW(io::read_imatrix(write(bytes.size())), Error);
  EXPECT_THROW(io::read_imatrix(golden::kRoot + "models/llama3/model.gguf"), Error);
}

}  // namespace
}  // namespace millrace
