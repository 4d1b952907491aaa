// A tiny Qwen 3 VL that sees, from a Hugging Face directory and with a tower of its own (mmproj), against
// transformers' processor and model: sizes and pixels, rows of the tower, answers; however its prompt is cut,
// in whatever company, and through the prefix cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "backend/backend.h"
#include "base/error.h"
#include "golden_reader.h"
#include "image/picture.h"
#include "image_support.h"
#include "io/checkpoint.h"
#include "millrace/engine.h"
#include "model/vision_tower.h"

namespace millrace::qwen_image_test {
namespace {

using namespace image_testing;

const std::string kQwen = golden::kRoot + "qwen_images/";
constexpr const char* kProjector = "qwen3vl_merger";

struct Seen {
  image::Picture resized;
  int32_t tokens = 0;
  std::vector<float> rows;  // [tokens, (1 + further) * hidden]
};

std::map<std::string, Seen> seen() {
  const nlohmann::json json = golden::read_json(kQwen + "golden.json");
  const std::vector<std::byte> all = golden::read_bytes(kQwen + "golden.bin");
  const std::byte* at = all.data();
  std::map<std::string, Seen> out;
  for (const char* name : {"square.png", "turned.png", "mill.png", "photo.jpg", "alpha.png"}) {
    const nlohmann::json& shape = json.at("pictures").at(name);
    Seen& entry = out[name];
    entry.resized = {shape.at("width"), shape.at("height"), {}};
    entry.resized.rgb.resize(size_t{3} * shape.at("width").get<size_t>() * shape.at("height").get<size_t>());
    std::memcpy(entry.resized.rgb.data(), at, entry.resized.rgb.size());
    at += entry.resized.rgb.size();
    entry.tokens = shape.at("tokens");
    entry.rows.resize(static_cast<size_t>(entry.tokens) * json.at("hidden").get<size_t>() *
                      (1 + json.at("further").get<size_t>()));
    std::memcpy(entry.rows.data(), at, entry.rows.size() * sizeof(float));
    at += entry.rows.size() * sizeof(float);
  }
  return out;
}

std::unique_ptr<Engine> open(const std::string& device, int32_t step_tokens = 0,
                             const std::string& mmproj = {}, int32_t running = 4,
                             const std::string& model = "qwen3vl") {
  EngineOptions options;
  options.model = kQwen + model;
  options.mmproj = mmproj;
  options.device = device;
  options.threads = 2;
  options.context = 256;
  options.kv_type = "f32";
  options.max_running = running;
  options.step_tokens = step_tokens;
  return Engine::create(options);
}

TEST(QwenImage, SizesAreTheProcessors) {
  const nlohmann::json json = golden::read_json(kQwen + "golden.json");
  const io::Checkpoint checkpoint = io::Checkpoint::open(kQwen + "qwen3vl");
  const std::unique_ptr<Backend> backend = make_backend("reference", {.threads = 1});
  const auto tower = VisionTower::open(checkpoint, kProjector, json.at("hidden"), *backend);
  for (const nlohmann::json& size : json.at("sizes")) {
    const ImageGrid grid = tower->grid_of(size.at(0), size.at(1));
    EXPECT_EQ(grid.width, size.at(2)) << size.dump();
    EXPECT_EQ(grid.height, size.at(3)) << size.dump();
    EXPECT_EQ(grid.tokens, grid.width * grid.height / 64);
  }
  EXPECT_THROW(tower->grid_of(1000, 4), Error);
}

TEST(QwenImage, PicturesAreResizedAsPillowDoesIt) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  for (const auto& [name, expected] : seen()) {
    SCOPED_TRACE(name);
    const image::Picture made = image::resize(image::decode(*file(name)), expected.resized.width,
                                              expected.resized.height, image::Filter::kCubic);
    EXPECT_LE(largest_difference(made, expected.resized), name == "photo.jpg" ? 4 : 1);  // another IDCT
  }
}

TEST(QwenImage, TowersAgreeWithTransformers) {
  const nlohmann::json json = golden::read_json(kQwen + "golden.json");
  for (const char* path : {"qwen3vl", "mmproj.gguf"}) {
    for (const char* device : {"reference", "cpu"}) {
      SCOPED_TRACE(std::string(path) + " " + device);
      const io::Checkpoint checkpoint = io::Checkpoint::open(kQwen + path);
      ASSERT_TRUE(VisionTower::is_in(checkpoint));
      const std::unique_ptr<Backend> backend = make_backend(device, {.threads = 2});
      const auto tower = VisionTower::open(checkpoint, kProjector, json.at("hidden"), *backend);
      EXPECT_EQ(tower->further(), json.at("further"));
      for (const auto& [name, expected] : seen()) {
        SCOPED_TRACE(name);
        const ImageGrid grid{.width = expected.resized.width,
                             .height = expected.resized.height,
                             .cubic = true,
                             .tokens = expected.tokens,
                             .rows = expected.resized.height / 8,
                             .columns = expected.resized.width / 8};
        const std::vector<float> rows = tower->rows_of(expected.resized.rgb.data(), grid);
        EXPECT_LT(golden::relative_error(rows, expected.rows), 1e-5);
      }
    }
  }
}

TEST(QwenImage, AnswersAgreeWithTransformers) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kQwen + "golden.json");
  for (const char* device : {"reference", "cpu"}) {
    for (const std::string& mmproj : {std::string(), kQwen + "mmproj.gguf"}) {
      SCOPED_TRACE(std::string(device) + " " + mmproj);
      const auto engine = open(device, 0, mmproj);
      EXPECT_EQ(engine->model().images.token, golden.at("start")) << engine->model().images.refusal;
      for (const nlohmann::json& prompt : golden.at("prompts")) {
        const bool resized = prompt.at("images").at(0) == "mill.png";
        if (resized && !mmproj.empty()) continue;  // GGUF files have llama.cpp's bounds of sizes
        const Answer answer = ask(*engine, prompt);
        // Of pictures that have to be resized, or are JPEG files, some pixels are a level of 255 off.
        EXPECT_LT(worst_logprob(answer, prompt), resized ? 3e-2 : 1e-4);
        if (!resized) {
          EXPECT_EQ(answer.tokens, prompt.at("next").get<std::vector<int32_t>>());
        }
        EXPECT_GT(worst_logprob(ask(*engine, prompt, /*exchanged=*/true), prompt), 0.1);
      }
    }
  }
  for (const std::string& device : further_devices())
    expect_sight(*open(device), golden.at("prompts"), device);
}

// Whose directory has no tower: it takes the one of the file.
TEST(QwenImage, WithExpertsToo) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kQwen + "golden.json");
  for (const char* device : {"reference", "cpu"}) {
    SCOPED_TRACE(device);
    const auto engine = open(device, 0, kQwen + "mmproj.gguf", 4, "qwen3vlmoe");
    for (const nlohmann::json& prompt : golden.at("experts")) {
      const Answer answer = ask(*engine, prompt);
      EXPECT_LT(worst_logprob(answer, prompt), 1e-4);
      EXPECT_EQ(answer.tokens, prompt.at("next").get<std::vector<int32_t>>());
      EXPECT_GT(worst_logprob(ask(*engine, prompt, /*exchanged=*/true), prompt), 0.1);
    }
  }
  for (const std::string& device : further_devices()) {
    expect_sight(*open(device, 0, kQwen + "mmproj.gguf", 4, "qwen3vlmoe"), golden.at("experts"), device);
  }
}

// Anywhere, within images too, and beside others.
void expect_same_however_cut(const std::string& device, const nlohmann::json& prompts) {
  const auto whole = open(device);
  std::vector<Answer> expected;
  for (const nlohmann::json& prompt : prompts) expected.push_back(ask(*whole, prompt));
  for (const int32_t step : {4, 7, 33}) {
    expect_answers(*open(device, step), prompts, expected);
  }
  const auto together = open(device, 24);
  std::vector<EventStream> streams;
  for (const nlohmann::json& prompt : prompts) streams.push_back(together->submit(request_of(prompt)));
  streams.push_back(together->submit({.tokens = {5, 6, 7, 8}, .max_tokens = 8, .ignore_end = true}));
  for (size_t i = 0; i < expected.size(); ++i) {
    const Answer answer = answer_of(streams[i]);
    EXPECT_EQ(answer.tokens, expected[i].tokens);
    EXPECT_EQ(answer.first, expected[i].first);
  }
  while (streams.back().next()) {
  }
}

TEST(QwenImage, HoweverThePromptIsCut) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kQwen + "golden.json");
  for (const std::string& device : golden::device_names()) {
    SCOPED_TRACE(device);
    expect_same_however_cut(device, golden.at("prompts"));
  }
}

TEST(QwenImage, ThePrefixCacheKnowsImagesByTheirContent) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kQwen + "golden.json");
  // 42 tokens before the first image
  expect_images_known_by_content(*open("cpu"), *open("cpu"), golden.at("prompts").at(1));
}

TEST(QwenImage, WhatCannotBeIsRefused) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const auto engine = open("cpu");
  const int32_t start = engine->model().images.token;
  EXPECT_EQ(engine->image_tokens(*file("mill.png")), 40u);
  EXPECT_THROW(engine->image_tokens(*file("golden.json")), Error);
  EXPECT_THROW(engine->submit({.tokens = {1, start, 5}, .images = {file("golden.json")}}), Error);
  EngineOptions other;  // a tower of another kind
  other.model = kQwen + "qwen3vl";
  other.device = "cpu";
  other.mmproj = kPictures + "mmproj.gguf";
  EXPECT_THROW(Engine::create(other), Error);
}

}  // namespace
}  // namespace millrace::qwen_image_test
