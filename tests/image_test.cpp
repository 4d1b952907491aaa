// Images: files decoded and resized as Pillow does it; a tiny Gemma 3 that sees, from a Hugging Face
// directory and with a tower of its own (mmproj), against transformers; however its prompt is cut, and
// through the prefix cache.
#include <gtest/gtest.h>

#include <cstring>

#include "backend/backend.h"
#include "base/error.h"
#include "golden_reader.h"
#include "image/picture.h"
#include "image_support.h"
#include "io/checkpoint.h"
#include "millrace/engine.h"
#include "model/vision_tower.h"

namespace millrace::image_test {
namespace {

using namespace image_testing;

const std::string kFolder = kPictures;

struct Recorded {
  image::Picture picture, resized;
  std::vector<float> rows;  // [rows, hidden]
};

std::map<std::string, Recorded> recorded() {
  const nlohmann::json json = golden::read_json(kFolder + "golden.json");
  const std::vector<std::byte> all = golden::read_bytes(kFolder + "golden.bin");
  const std::byte* at = all.data();
  const auto take = [&](int32_t width, int32_t height) {
    image::Picture out{width, height, {}};
    out.rgb.resize(static_cast<size_t>(width) * static_cast<size_t>(height) * 3);
    std::memcpy(out.rgb.data(), at, out.rgb.size());
    at += out.rgb.size();
    return out;
  };
  const int32_t size = json.at("image_size");
  std::map<std::string, Recorded> out;
  for (const char* name : {"mill.png", "photo.jpg"}) {
    const nlohmann::json& shape = json.at("pictures").at(name);
    Recorded& entry = out[name];
    entry.picture = take(shape.at("width"), shape.at("height"));
    entry.resized = take(size, size);
    entry.rows.resize(json.at("rows").get<size_t>() * json.at("hidden").get<size_t>());
    std::memcpy(entry.rows.data(), at, entry.rows.size() * sizeof(float));
    at += entry.rows.size() * sizeof(float);
  }
  return out;
}

TEST(Image, FilesAreReadAsPillowReadsThem) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  for (const auto& [name, expected] : recorded()) {
    SCOPED_TRACE(name);
    const image::Picture picture = image::decode(*file(name));
    EXPECT_LE(largest_difference(picture, expected.picture), name == "mill.png" ? 0 : 3);  // another IDCT
    const image::Picture resized =
        image::resize(expected.picture, expected.resized.width, expected.resized.height);
    EXPECT_LE(largest_difference(resized, expected.resized), 1);
  }
  // What is transparent keeps its colour.
  const image::Picture mill = image::decode(*file("mill.png")), alpha = image::decode(*file("alpha.png"));
  EXPECT_TRUE(std::equal(alpha.at(0, 0), alpha.at(0, 0) + 3, mill.at(0, 0)));
}

std::string from_hex(std::string_view text) {
  std::string out;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    out += static_cast<char>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16));
  return out;
}

std::string refusal_of(std::string bytes) {
  try {
    image::decode(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBadInput);
    return error.what();
  }
  return "";
}

// Depths, palettes, interlacing, inks, orientations (tests/golden/make_odd_pictures.py).
TEST(Image, FilesOfEveryKindAreReadAsPillowReadsThem) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json all = golden::read_json(kFolder + "odd.json");
  for (const auto& [name, expected] : all.items()) {
    SCOPED_TRACE(name);
    const std::string rgb = from_hex(expected.at("rgb").get<std::string>());
    const image::Picture pillows{expected.at("width"), expected.at("height"), {rgb.begin(), rgb.end()}};
    const image::Picture picture = image::decode(from_hex(expected.at("file").get<std::string>()));
    ASSERT_EQ(picture.width, pillows.width);
    ASSERT_EQ(picture.height, pillows.height);
    EXPECT_LE(largest_difference(picture, pillows), expected.at("bound").get<int>());
  }
}

TEST(Image, AFileOfManyScansIsRefused) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json all = golden::read_json(kFolder + "odd.json");
  std::string file = from_hex(all.at("progressive.jpg").at("file").get<std::string>());
  const size_t last = file.rfind("\xff\xda"), end = file.rfind("\xff\xd9");
  const std::string scan = file.substr(last, end - last);
  for (int i = 0; i < 600; ++i) file.insert(end, scan);
  EXPECT_NE(refusal_of(file).find("more than 500 scans"), std::string::npos);
}

// What two samples of 16 bits, or a gamma chunk, would become if they were taken for light.
TEST(Image, SamplesAreTakenAsTheyAre) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  // 2 x 1 pixels: of 16 bits (0x1234 0x5678 0x9abc, 0xdef0 0x0f1e 0x2d3c), and of 8 with gAMA 1.0.
  const std::string wide = from_hex(
      "89504e470d0a1a0a0000000d49484452000000020000000110020000002bd0349e000000154944415478da63103209ab"
      "98b5e7de077e395d1b001fb904cfd46848600000000049454e44ae426082");
  const std::string light = from_hex(
      "89504e470d0a1a0a0000000d49484452000000020000000108020000007b40e8dd0000000467414d41000186a031e896"
      "5f0000000f4944415478da63100a9b758f5f1700076e021d907ec7c80000000049454e44ae426082");
  const std::vector<uint8_t> expected = {0x12, 0x56, 0x9a, 0xde, 0x0f, 0x2d};
  EXPECT_EQ(image::decode(wide).rgb, expected);
  EXPECT_EQ(image::decode(light).rgb, expected);
}

TEST(Image, BadFilesAreRefusedInOneLine) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  EXPECT_NE(refusal_of("GIF89a").find("neither"), std::string::npos);
  for (const char* name : {"mill.png", "photo.jpg"}) {
    const std::string whole = *file(name);
    EXPECT_NE(refusal_of(whole.substr(0, 30)).find("damaged"), std::string::npos);
    EXPECT_NE(refusal_of(whole.substr(0, whole.size() / 2)).find("damaged"), std::string::npos);
    std::string huge = whole;  // what it says of its size is looked at first
    const size_t at = name == std::string("mill.png") ? 16 : huge.find("\xff\xc0") + 5;
    huge[at] = huge[at + 1] = '\x7f';
    EXPECT_FALSE(refusal_of(huge).empty());
    for (size_t i = 0; i < whole.size(); i += 7) {  // whatever is damaged: an error, or some picture
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ 0x55);
      refusal_of(damaged);
    }
  }
  EXPECT_THROW(image::check_size("PNG", 100000, 10), Error);
  EXPECT_THROW(image::check_size("PNG", 10000, 10000), Error);
}

TEST(Image, TowersAgreeWithTransformers) {
  for (const char* path : {"gemma3", "mmproj.gguf"}) {
    for (const char* device : {"reference", "cpu"}) {
      SCOPED_TRACE(std::string(path) + " " + device);
      const io::Checkpoint checkpoint = io::Checkpoint::open(kFolder + path);
      ASSERT_TRUE(VisionTower::is_in(checkpoint));
      const std::unique_ptr<Backend> backend = make_backend(device, {.threads = 2});
      const std::unique_ptr<VisionTower> tower = VisionTower::open(checkpoint, "gemma3", 32, *backend);
      const ImageGrid grid = tower->grid_of(1, 1);
      EXPECT_EQ(grid.tokens, 16);
      for (const auto& [name, expected] : recorded()) {
        const std::vector<float> rows = tower->rows_of(expected.resized.rgb.data(), grid);
        EXPECT_LT(golden::relative_error(rows, expected.rows), 1e-5);
      }
    }
  }
}

std::unique_ptr<Engine> open(const std::string& device, int32_t step_tokens = 0,
                             const std::string& mmproj = {}) {
  EngineOptions options;
  options.model = kFolder + "gemma3";
  options.mmproj = mmproj;
  options.device = device;
  options.threads = 2;
  options.context = 256;
  options.kv_type = "f32";
  options.max_running = 2;
  options.step_tokens = step_tokens;
  return Engine::create(options);
}

TEST(Image, AnswersAgreeWithTransformers) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kFolder + "golden.json");
  for (const char* device : {"reference", "cpu"}) {
    for (const std::string& mmproj : {std::string(), kFolder + "mmproj.gguf"}) {
      SCOPED_TRACE(std::string(device) + " " + mmproj);
      const auto engine = open(device, 0, mmproj);
      EXPECT_EQ(engine->model().images.token, golden.at("boi"));
      for (const nlohmann::json& prompt : golden.at("prompts")) {
        const Answer answer = ask(*engine, prompt);
        // Of pictures that have to be resized, or are JPEG files, some pixels are a level of 255 off.
        const bool exact = prompt.at("images").at(0) != "mill.png";
        EXPECT_LT(worst_logprob(answer, prompt), exact ? 1e-4 : 2e-2);
        EXPECT_EQ(answer.tokens, prompt.at("next").get<std::vector<int32_t>>());
        EXPECT_GT(worst_logprob(ask(*engine, prompt, /*exchanged=*/true), prompt), 0.02);
      }
    }
  }
  for (const std::string& device : further_devices())
    expect_sight(*open(device), golden.at("prompts"), device);
}

// A step has room for an image and four tokens: the same bits as in one piece.
TEST(Image, HoweverThePromptIsCut) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kFolder + "golden.json");
  for (const std::string& device : golden::device_names()) {
    SCOPED_TRACE(device);
    const auto whole = open(device);
    std::vector<Answer> expected;
    for (const nlohmann::json& prompt : golden.at("prompts")) expected.push_back(ask(*whole, prompt));
    expect_answers(*open(device, 20), golden.at("prompts"), expected);
  }
}

TEST(Image, ThePrefixCacheKnowsImagesByTheirContent) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const nlohmann::json golden = golden::read_json(kFolder + "golden.json");
  // 41 tokens before the first image
  expect_images_known_by_content(*open("cpu"), *open("cpu"), golden.at("prompts").at(1));
}

TEST(Image, WhatCannotBeIsRefused) {
  if (!decodes()) GTEST_SKIP() << "this build has no libpng and libjpeg-turbo";
  const auto engine = open("cpu");
  const int32_t boi = engine->model().images.token;
  const auto refused = [](Engine& from, const Request& request) {
    try {
      from.submit(request);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(
      refused(*engine, {.tokens = {1, boi, 5}, .images = {file("mill.png"), file("mill.png")}}).find("2"),
      std::string::npos);
  EXPECT_NE(refused(*engine, {.tokens = {1, boi, 5}, .images = {file("golden.json")}}).find("neither"),
            std::string::npos);
  Request scored{.tokens = {1, boi, 5}, .images = {file("mill.png")}};
  scored.prompt_logits = true;
  EXPECT_FALSE(refused(*engine, scored).empty());
  EngineOptions text;
  text.model = golden::kRoot + "models/gemma3/model.gguf";
  text.device = "cpu";
  text.context = 64;
  const auto blind = Engine::create(text);
  EXPECT_EQ(blind->model().images.token, -1);
  EXPECT_FALSE(refused(*blind, {.tokens = {1, 5}, .images = {file("mill.png")}}).empty());
  text.model = golden::kRoot + "models/llama2/model.gguf";
  text.mmproj = kFolder + "mmproj.gguf";
  EXPECT_THROW(Engine::create(text), Error);
}

}  // namespace
}  // namespace millrace::image_test
