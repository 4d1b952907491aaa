// Opening a path: GGUF, Hugging Face directory, a file inside one, and what is none of them.
#include "io/checkpoint.h"

#include <gtest/gtest.h>

#include "io/hf_directory.h"
#include "io/test_files.h"

namespace millrace::io {
namespace {

using testing::expect_contains;
using testing::GgufBuilder;
using testing::message_of;
using testing::safetensors_file;
using testing::TempDir;

std::string weights(const std::string& tensor) {
  return safetensors_file(R"({")" + tensor + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "w");
}

std::string open_error(const std::string& path) {
  return message_of([&] { Checkpoint::open(path); });
}

TEST(Checkpoint, OpensGgufByItsMagic) {
  const TempDir dir;
  const std::string path = dir.write("model.bin", GgufBuilder().tensor("t", {1}, 0, 0).data("abcd").build());
  const Checkpoint checkpoint = Checkpoint::open(path);
  ASSERT_TRUE(checkpoint.gguf);
  EXPECT_FALSE(checkpoint.hf);
  EXPECT_EQ(checkpoint.path(), path);
  EXPECT_NE(checkpoint.find_tensor("t"), nullptr);
}

TEST(Checkpoint, OpensADirectoryWithAllItsFiles) {
  const TempDir dir;
  dir.write("config.json", R"({"model_type":"llama"})");
  const std::string file = dir.write("model.safetensors", weights("t"));
  for (const std::string& path : {dir.path(), file}) {
    const Checkpoint bare = Checkpoint::open(path);
    ASSERT_TRUE(bare.hf);
    EXPECT_EQ(bare.hf->config["model_type"], "llama");
    EXPECT_TRUE(bare.hf->generation_config.is_null());
    EXPECT_TRUE(bare.hf->tokenizer_config.is_null());
    EXPECT_TRUE(bare.hf->tokenizer_json.empty());
    EXPECT_TRUE(bare.hf->chat_template.empty());
    EXPECT_EQ(bare.tensors().size(), 1u);
  }
  dir.write("generation_config.json", R"({"eos_token_id":2})");
  dir.write("tokenizer.json", "{}");
  dir.write("tokenizer_config.json",
            R"({"chat_template":[{"name":"tool","template":"T"},{"name":"default","template":"D"}]})");
  Checkpoint full = Checkpoint::open(dir.path());
  EXPECT_EQ(full.hf->generation_config["eos_token_id"], 2);
  EXPECT_EQ(full.hf->tokenizer_json, "{}");
  EXPECT_EQ(full.hf->chat_template, "D");
  dir.write("tokenizer_config.json", R"({"chat_template":"one"})");
  EXPECT_EQ(Checkpoint::open(dir.path()).hf->chat_template, "one");
  dir.write("chat_template.jinja", "file");
  EXPECT_EQ(Checkpoint::open(dir.path()).hf->chat_template, "file");
}

TEST(Checkpoint, AShardGivenDirectlyOpensAllShards) {
  const TempDir dir;
  dir.write("config.json", "{}");
  dir.write("model.safetensors.index.json", R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  dir.write("1.safetensors", weights("a"));
  const std::string second = dir.write("2.safetensors", weights("b"));
  EXPECT_EQ(Checkpoint::open(second).tensors().size(), 2u);
}

TEST(Checkpoint, SaysWhatIsMissing) {
  const TempDir dir;
  expect_contains(open_error(dir.path()), {dir.path() + ": config.json: found no such file"});
  dir.write("config.json", "{}");
  expect_contains(open_error(dir.path()), {dir.path() + ": weights: found neither model.safetensors nor"});
  expect_contains(open_error(dir.path() + "/absent"), {"/absent: cannot open: No such file or directory"});
}

TEST(Checkpoint, SaysWhatItFoundInstead) {
  const TempDir dir;
  expect_contains(
      open_error(dir.write("a.bin", std::string("PK\3\4 and more of it", 20))),
      {"a.bin: magic: found 'PK\\x03\\x04 and more of'", "expected a file that begins with 'GGUF'"});
  expect_contains(open_error(dir.write("empty", "")), {"empty: magic: found an empty file"});
  expect_contains(open_error(dir.write("short.gguf", "GG")), {"short.gguf: magic: found 'GG', expected"});
  expect_contains(open_error("/dev/null"), {"/dev/null: found a device or a pipe, expected a regular file"});
}

TEST(Checkpoint, ConfigFilesMustBeObjects) {
  const TempDir dir;
  dir.write("model.safetensors", weights("t"));
  const auto with = [&](const char* name, const std::string& text) {
    dir.write(name, text);
    const std::string message = open_error(dir.path());
    dir.write(name, "{}");
    return message;
  };
  expect_contains(with("config.json", ""), {"config.json: JSON: found a syntax error"});
  expect_contains(with("config.json", "[1]"), {"config.json: JSON: found array, expected an object"});
  expect_contains(with("config.json", R"({"a":1e999})"), {"config.json: JSON: found a number out of range"});
  expect_contains(with("config.json", std::string(100, '[')),
                  {"config.json: JSON: found values nested deeper than 64"});
  expect_contains(with("config.json", std::string(17 << 20, ' ')),
                  {"config.json: size: found 17825792 bytes, expected at most"});
  expect_contains(with("generation_config.json", "3"), {"generation_config.json: JSON: found number"});
  expect_contains(with("tokenizer_config.json", "\"x\""), {"tokenizer_config.json: JSON: found string"});
  expect_contains(with("tokenizer_config.json", R"({"chat_template":3})"),
                  {"tokenizer_config.json: chat_template: found number"});
}

}  // namespace
}  // namespace millrace::io
