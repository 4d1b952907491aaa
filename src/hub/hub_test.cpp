// Names, labels, the choice of files, ranges and headers: what needs no server. tests/hub_test.py has the
// rest.
#include "hub/known_models.h"
#include "hub/model_name.h"
#include "hub/repo_file.h"
#include "hub/settings.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "hub/byte_ranges.h"
#include "hub/file_choice.h"
#include "hub/gguf_head.h"
#include "hub/hub_client.h"
#include "hub/model_cache.h"
#include "hub/quant_label.h"
#include "hub/safe_path.h"

namespace millrace::hub {
namespace {

TEST(ModelName, WaysToWriteIt) {
  const struct {
    const char *text, *repo, *revision, *choice;
  } cases[] = {
      {"hf:a/b", "a/b", "main", ""},
      {"hf://a/b", "a/b", "main", ""},
      {"hf:gpt2", "gpt2", "main", ""},
      {"hf:a/b:Q4_K_M", "a/b", "main", "Q4_K_M"},
      {"hf:a/b:folder/file.gguf", "a/b", "main", "folder/file.gguf"},
      {"hf:a/b@refs/pr/2:Q8_0", "a/b", "refs/pr/2", "Q8_0"},
      {"hf.co/a/b:Q8_0", "a/b", "main", "Q8_0"},
      {"https://huggingface.co/a/b", "a/b", "main", ""},
      {"https://huggingface.co/a/b/tree/v1", "a/b", "v1", ""},
      {"https://huggingface.co/a/b/resolve/main/f.gguf?download=true", "a/b", "main", "f.gguf"},
      {"huggingface.co/a/b/blob/main/x/f.gguf", "a/b", "main", "x/f.gguf"},
  };
  for (const auto& c : cases) {
    const std::optional<ModelName> name = parse_name(c.text);
    ASSERT_TRUE(name) << c.text;
    EXPECT_EQ(name->repo, c.repo) << c.text;
    EXPECT_EQ(name->revision, c.revision) << c.text;
    EXPECT_EQ(name->choice, c.choice) << c.text;
    EXPECT_EQ(parse_name(name->text())->text(), name->text());
  }
  for (const char* path : {"model.gguf", "a/b", "./hf", "gpt-oss-20b", "", "http://example.com/a/b"}) {
    EXPECT_FALSE(parse_name(path)) << path;
  }
  for (const char* bad : {"hf:", "hf:a/b/c", "hf:../x", "hf:a/b:", "hf:a/b@", "hf:a b", "hf:a/b:../x",
                          "hf:a/b:/x", "hf:a--b/c", "hf:a/b@x/../y", "hf.co/a/b/settings", "hf:a/b:x\ny"}) {
    EXPECT_THROW(parse_name(bad), Error) << bad;
  }
}

TEST(QuantLabel, OfFileNames) {
  const struct {
    const char *path, *label;
  } cases[] = {
      {"Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"},
      {"qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"},
      {"gpt-oss-20b-mxfp4.gguf", "MXFP4"},
      {"tinyllama-1.1b-chat-v1.0.Q5_0.gguf", "Q5_0"},
      {"Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"},
      {"BF16/model-00001-of-00003.gguf", "BF16"},
      {"model-f16.gguf", "F16"},
      {"model_q8_0.gguf", "Q8_0"},
      {"model-IQ2_XXS.gguf", "IQ2_XXS"},
      {"model-Q4_0_4_4.gguf", "Q4_0_4_4"},
      {"Q4-story.gguf", "Q4"},
      {"model.gguf", ""},
      {"Qwen3-4B.gguf", ""},
      {"seq4.gguf", ""},
  };
  for (const auto& c : cases) EXPECT_EQ(quant_label(c.path), c.label) << c.path;
  EXPECT_LT(label_rank("Q4_K_M"), label_rank("Q8_0"));
  EXPECT_LT(label_rank("MXFP4"), label_rank("F16"));
  EXPECT_LT(label_rank("F32"), label_rank("IQ2_XXS"));
  EXPECT_GE(label_rank("Q3_K_M"), kUnloadable);
  EXPECT_EQ(label_key("fp16"), label_key("F16"));
  const PartName part = part_name("x/m-00002-of-00003.gguf");
  EXPECT_EQ(part.prefix, "x/m");
  EXPECT_EQ(part.part, 2);
  EXPECT_EQ(part.parts, 3);
  EXPECT_EQ(part_name("m-00004-of-00003.gguf").parts, 1);
}

std::vector<RepoFile> files_named(std::initializer_list<const char*> paths) {
  std::vector<RepoFile> files;
  for (const char* path : paths) files.push_back({.path = path, .size = 1, .sha256 = {}, .blob_sha1 = {}});
  return files;
}

TEST(FileChoice, OneOfSeveral) {
  const auto files =
      files_named({"m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q4_0.gguf", "m-Q3_K_M.gguf",
                   "config.json", "model.safetensors", "tokenizer.json", "mmproj-F16.gguf"});
  const auto first = [&](const char* wanted) {
    const FileChoice choice = choose_files(files, wanted);
    return choice.problem.empty() ? choice.group.files[0].path : "problem: " + choice.problem;
  };
  EXPECT_EQ(first(""), "m-Q4_K_M.gguf");
  EXPECT_EQ(first("q8_0"), "m-Q8_0.gguf");
  EXPECT_EQ(first("Q4"), "m-Q4_K_M.gguf");
  EXPECT_EQ(first("Q4_K_S"), "m-Q4_K_S.gguf");
  EXPECT_EQ(first("m-Q4_0"), "m-Q4_0.gguf");
  EXPECT_EQ(first("q3_k_m"), "m-Q3_K_M.gguf");
  EXPECT_EQ(first("safetensors"), "config.json");
  EXPECT_EQ(choose_files(files, "safetensors").group.files.size(), 3U);
  EXPECT_NE(choose_files(files, "F16").problem.find("Q4_K_M"), std::string::npos);
  EXPECT_NE(choose_files(files, "").why.find("Q4_K_M of"), std::string::npos);
  EXPECT_TRUE(choose_files(files, "Q8_0").why.empty());
}

TEST(FileChoice, WhatIsNotWhole) {
  EXPECT_FALSE(
      choose_files(files_named({"m-00001-of-00003.gguf", "m-00003-of-00003.gguf"}), "").problem.empty());
  EXPECT_FALSE(choose_files(files_named({"config.json"}), "").problem.empty());
  EXPECT_FALSE(choose_files(files_named({"config.json", "model.safetensors.index.json",
                                         "model-00001-of-00002.safetensors"}),
                            "")
                   .problem.empty());
  EXPECT_EQ(
      choose_files(files_named({"config.json", "model.safetensors.index.json", "original/model-x.safetensors",
                                "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
                   "")
          .group.files.size(),
      4U);
  EXPECT_NE(choose_files(files_named({"pytorch_model.bin"}), "").problem.find(".bin"), std::string::npos);
}

TEST(ByteRanges, JoinAndMissing) {
  ByteRanges ranges;
  EXPECT_EQ(ranges.missing(10, 4), (std::vector<ByteRange>{{0, 4}, {4, 8}, {8, 10}}));
  ranges.add({4, 6});
  ranges.add({0, 2});
  EXPECT_EQ(ranges.prefix(), 2U);
  EXPECT_EQ(ranges.missing(10, 100), (std::vector<ByteRange>{{2, 4}, {6, 10}}));
  ranges.add({1, 5});
  EXPECT_EQ(ranges.ranges(), (std::vector<ByteRange>{{0, 6}}));
  ranges.add({9, 10});
  EXPECT_EQ(ranges.bytes(), 7U);
  ranges.add({6, 9});
  EXPECT_TRUE(ranges.missing(10, 3).empty());
  EXPECT_TRUE(ByteRanges().missing(0, 3).empty());
}

TEST(HubClient, Redirects) {
  EXPECT_EQ(redirected("http://a:1/x/y?z", "https://b/c"), "https://b/c");
  EXPECT_EQ(redirected("http://a:1/x/y?z", "/c"), "http://a:1/c");
  EXPECT_EQ(redirected("https://a/x", "//b/c"), "https://b/c");
  EXPECT_EQ(redirected("http://a/x/y?u=/", "c"), "http://a/x/c");
  EXPECT_EQ(etag_name("W/\"abc\""), "abc");
  EXPECT_EQ(etag_name("\"a/b\""), "");
  EXPECT_EQ(etag_name("\"..\""), "");
}

TEST(HubClient, WhenToAskAgain) {
  const auto answer = [](int status, std::map<std::string, std::string> headers = {}) {
    return HttpAnswer{.status = status, .headers = std::move(headers), .error = {}, .unreachable = false};
  };
  EXPECT_FALSE(retry_after(answer(404), 1));
  EXPECT_EQ(retry_after(answer(503), 1)->count(), 500);
  EXPECT_EQ(retry_after(answer(503), 3)->count(), 2000);
  EXPECT_FALSE(retry_after(answer(503), 5));
  EXPECT_EQ(retry_after(answer(429, {{"retry-after", "7"}}), 1)->count(), 7000);
  EXPECT_EQ(retry_after(answer(429, {{"ratelimit", "\"api\";r=0;t=9"}}), 1)->count(), 9000);
  EXPECT_FALSE(retry_after(answer(429, {{"retry-after", "7200"}}), 1));
}

TEST(KnownModels, AreNamesOfTheHub) {
  for (const KnownModel& model : known_models()) {
    ASSERT_TRUE(parse_name(model.hub)) << model.name;
    EXPECT_EQ(find_known(model.name), &model);
    EXPECT_FALSE(parse_name(model.name));
  }
  EXPECT_NE(find_known("GPT-OSS-20B"), nullptr);
  EXPECT_EQ(find_known("gpt-oss"), nullptr);
  EXPECT_EQ(similar_names("gpt-oss")[0], "gpt-oss-20b");
  EXPECT_EQ(similar_names("smollm2-135")[0], "smollm2-135m");
  EXPECT_TRUE(similar_names("zzz").empty());
}

TEST(Cache, FoldersOfRepositories) {
  Settings settings;
  settings.cache = "/c";
  EXPECT_EQ(RepoFolder(settings, "a/b").path(), "/c/models--a--b");
  EXPECT_EQ(RepoFolder(settings, "a/b").lock("x"), "/c/.locks/models--a--b/x.lock");
  EXPECT_EQ(repo_of_folder("models--a--b"), "a/b");
  EXPECT_EQ(repo_of_folder("datasets--a--b"), "");
  EXPECT_FALSE(is_safe_path("a/../b"));
  EXPECT_FALSE(is_safe_path("/a"));
  EXPECT_FALSE(is_safe_path("a//b"));
  EXPECT_TRUE(is_safe_path("a/b.c"));
}

TEST(GgufHead, EndsWhereItEnds) {
  std::ifstream file("tests/golden/models/llama3/model.gguf", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  ASSERT_GT(bytes.size(), 1000U);
  // The header is whole from one length on, and at no length before.
  size_t low = 0, high = bytes.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (has_whole_gguf_head(std::string_view(bytes).substr(0, middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  EXPECT_GT(low, 1000U);
  EXPECT_LT(low, bytes.size());
  for (size_t length = 0; length < low; length += 97) {
    EXPECT_FALSE(has_whole_gguf_head(std::string_view(bytes).substr(0, length))) << length;
  }
  EXPECT_EQ(gguf_architecture("tests/golden/models/llama3/model.gguf"), "llama");
  EXPECT_EQ(gguf_architecture("README.md"), "");
}

}  // namespace
}  // namespace millrace::hub
