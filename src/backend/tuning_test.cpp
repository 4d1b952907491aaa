// Tuning tables and their files; a made-up device takes the place of a GPU.
#include "backend/tuning.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "backend/backend.h"
#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace {
namespace {

TuningTable sample_table() {
  TuningTable table;
  table.target = {"NVIDIA H200", "13.0", "CUDA 13.0, kernels 1"};
  table.entries.push_back(
      {"q, k, v", {"gemm", "bf16", 5120, 2880, 2048}, "large", {{"whole", 103.25}, {"large", 88.5}}});
  table.entries.push_back(
      {"logits", {"gemv", "q8", 201088, 2880, 1}, "ring 200000", {{"ring 165000", 160.0}}});
  return table;
}

class TunedDevice final : public Backend {
 public:
  TuningTarget target = sample_table().target;
  TuningTable used;
  bool refuses = false;

  std::string_view name() const override { return "made up"; }
  std::string description() const override { return "made up"; }
  std::string_view isa() const override { return "none"; }
  int threads() const override { return 1; }
  DType default_kv_type() const override { return DType::kBF16; }
  bool supports_kv_type(DType) const override { return true; }
  size_t weight_bytes(const TensorView&, WeightUse, size_t) const override { return 0; }
  WeightPtr load_weight(const TensorView&, WeightUse) override { return nullptr; }
  size_t workspace_bytes(const ExecutorSpec&) const override { return 0; }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec&) override { return nullptr; }
  void parallel(int64_t, const std::function<void(int64_t, int64_t)>&) override {}
  std::optional<TuningTarget> tuning_target() const override { return target; }
  void use_tuning(const TuningTable& table) override {
    if (refuses) throw_error(ErrorCode::kBadInput, "choice \"x\" of gemm, expected whole");
    used = table;
  }
};

class Tuning : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::temp_directory_path() /
                 ("millrace_tuning_" + std::to_string(testing::UnitTest::GetInstance()->random_seed()) + "_" +
                  testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
    setenv("XDG_CACHE_HOME", directory_.c_str(), 1);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  void write(const std::string& text) {
    const std::filesystem::path path = tuning_file(device_.target);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::filesystem::path directory_;
  TunedDevice device_;
};

TEST_F(Tuning, TextComesBack) {
  const TuningTable want = sample_table(), got = parse_tuning(tuning_text(want), "f");
  EXPECT_EQ(got.target, want.target);
  ASSERT_EQ(got.entries.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(got.entries[i].what, want.entries[i].what);
    EXPECT_EQ(got.entries[i].key, want.entries[i].key);
    EXPECT_EQ(got.entries[i].choice, want.entries[i].choice);
    ASSERT_EQ(got.entries[i].times.size(), want.entries[i].times.size());
    EXPECT_EQ(got.entries[i].times.back().candidate, want.entries[i].times.back().candidate);
    EXPECT_EQ(got.entries[i].times.back().us, want.entries[i].times.back().us);
  }
}

TEST_F(Tuning, FileIsNamedAfterTheGpuAndTheDriver) {
  EXPECT_EQ(tuning_file({"NVIDIA H200", "13.0", "x"}),
            directory_.string() + "/millrace/tune-nvidia_h200-13.0.json");
  EXPECT_EQ(tuning_file({"../A  b/", "13.0", "x"}), directory_.string() + "/millrace/tune-.._a_b_-13.0.json");
  setenv("XDG_CACHE_HOME", "relative", 1);
  setenv("HOME", "/h", 1);
  EXPECT_EQ(tuning_file({"g", "1", "x"}), "/h/.cache/millrace/tune-g-1.json");
}

TEST_F(Tuning, WhatWasWrittenIsLoaded) {
  EXPECT_EQ(load_tuning(device_), "");  // no file: nothing to say
  EXPECT_TRUE(device_.used.entries.empty());
  write_tuning(sample_table(), tuning_file(device_.target));
  EXPECT_EQ(load_tuning(device_), "");
  ASSERT_EQ(device_.used.entries.size(), 2u);
  EXPECT_EQ(device_.used.entries[0].choice, "large");
}

TEST_F(Tuning, StaleFileIsNamedAndNotUsed) {
  write_tuning(sample_table(), tuning_file(device_.target));
  device_.target.build = "CUDA 13.0, kernels 2";
  const std::string said = load_tuning(device_);
  EXPECT_NE(said.find("tune-nvidia_h200-13.0.json"), std::string::npos) << said;
  EXPECT_NE(said.find("kernels 1"), std::string::npos) << said;
  EXPECT_NE(said.find("kernels 2"), std::string::npos) << said;
  EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  EXPECT_TRUE(device_.used.entries.empty());
}

TEST_F(Tuning, BadFilesAreNamedAndNotUsed) {
  const std::string good = tuning_text(sample_table());
  std::vector<std::string> bad = {"", "{", "[]", "7", "{\"file\": \"millrace tuning\"}"};
  for (const char* name : {"file", "version", "device", "entries", "kernel", "outputs", "choice", "us"}) {
    std::string text = good;
    text.replace(text.find('"' + std::string(name) + '"') + 1, 1, "Z");  // no such field
    bad.push_back(text);
  }
  std::string text = good;
  text.replace(text.find("5120"), 4, "\"a\"");  // a field of another type
  bad.push_back(text);
  for (size_t cut = 1; cut < good.size() - 2; cut += 37) bad.push_back(good.substr(0, cut));
  for (const std::string& content : bad) {
    write(content);
    const std::string said = load_tuning(device_);
    EXPECT_NE(said.find("tune-nvidia_h200-13.0.json"), std::string::npos) << content << "\n" << said;
    EXPECT_NE(said.find("built-in choices are used"), std::string::npos) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
    EXPECT_TRUE(device_.used.entries.empty());
  }
  write(good);
  device_.refuses = true;  // a name that the device does not know
  EXPECT_NE(load_tuning(device_).find("expected whole"), std::string::npos);
}

TEST_F(Tuning, MergingReplacesEqualKeys) {
  TuningTable made = sample_table();
  made.entries.pop_back();
  made.entries[0].choice = "whole";
  const TuningTable all = merge_tuning(sample_table(), made);
  ASSERT_EQ(all.entries.size(), 2u);
  EXPECT_EQ(all.entries[0].choice, "whole");
  EXPECT_EQ(all.entries[1].what, "logits");
  made.target.driver = "14.0";
  EXPECT_EQ(merge_tuning(sample_table(), made).entries.size(), 1u);
}

}  // namespace
}  // namespace millrace
