// Classification heads through the engine against transformers: scores of pairs of texts, tiny cross-encoders
// in both file formats.
#include <gtest/gtest.h>

#include "base/error.h"
#include "golden_reader.h"
#include "millrace/engine.h"

namespace millrace::classifier_test {
namespace {

const std::string kFolder = golden::kRoot + "classifiers/";

std::unique_ptr<Engine> open(const std::string& model, const std::string& device) {
  EngineOptions options;
  options.model = model;
  options.device = device;
  options.threads = 2;
  options.kv_type = "f32";
  options.max_running = 4;
  return Engine::create(options);
}

Event last_event(Engine& engine, const Request& request) {
  EventStream stream = engine.submit(request);
  return stream.next().value_or(Event{});
}

// Allowed: of each pair's scores, where `each`; else of all scores of the model together. A score by itself
// may be next to nothing, and a device that rounds is off by a part of what the others are.
void compare(Engine& engine, const nlohmann::json& golden, double allowed = 1e-4, bool each = true) {
  std::vector<float> found, expected;
  EXPECT_EQ(engine.model().labels, golden.at("labels"));
  EXPECT_EQ(engine.model().score_sigmoid, golden.at("sigmoid") && golden.at("labels") == 1);
  for (const nlohmann::json& pair : golden.at("pairs")) {
    Request request{.tokens = pair.at("tokens").get<std::vector<int32_t>>(), .embedding = Pooling::kScores};
    request.second_text = pair.at("second");
    const Event event = last_event(engine, request);
    ASSERT_EQ(event.finish, FinishReason::kEmbedded) << event.error;
    const auto scores = pair.at("scores").get<std::vector<float>>();
    if (each) {
      EXPECT_LT(golden::relative_error(event.embedding, scores), allowed);
    }
    found.insert(found.end(), event.embedding.begin(), event.embedding.end());
    expected.insert(expected.end(), scores.begin(), scores.end());
  }
  EXPECT_LT(golden::relative_error(found, expected), allowed);
}

TEST(Classifier, PairsAgreeWithTransformers) {
  for (const char* name : {"bert", "bert-labels", "modernbert", "modernbert-mean"}) {
    const nlohmann::json golden = golden::read_json(kFolder + name + "/golden.json");
    std::vector<std::string> paths = {kFolder + name + "/hf"};
    if (golden.at("gguf")) paths.push_back(kFolder + name + "/model.gguf");
    for (const std::string& path : paths) {
      SCOPED_TRACE(path);
      compare(*open(path, "reference"), golden);
      compare(*open(path, "cpu"), golden);
      // golden_test.cpp's bound for a GPU, which rounds the inputs of products with 16-bit weights: of three
      // layers. BERT without types of tokens would be off by half.
      for (const std::string& device : golden::device_names()) {
        if (device != "cpu") compare(*open(path, device), golden, 3 * 0.0025 * 4, /*each=*/false);
      }
    }
  }
}

// Types of tokens are not ignored: BERT's score is another when all of a pair is one text.
TEST(Classifier, TheSecondTextCounts) {
  const nlohmann::json golden = golden::read_json(kFolder + "bert/golden.json");
  const nlohmann::json& pair = golden.at("pairs").at(2);
  const auto engine = open(kFolder + "bert/model.gguf", "cpu");
  const Event one = last_event(
      *engine, {.tokens = pair.at("tokens").get<std::vector<int32_t>>(), .embedding = Pooling::kScores});
  EXPECT_GT(golden::relative_error(one.embedding, pair.at("scores").get<std::vector<float>>()), 1e-2);
}

TEST(Classifier, WhatHasNoHeadSaysSo) {
  const auto engine = open(golden::kRoot + "encoders/bert/hf", "cpu");
  EXPECT_EQ(engine->model().labels, 0);
  EXPECT_THROW(engine->submit({.tokens = {5, 6}, .embedding = Pooling::kScores}), Error);
  const auto classifier = open(kFolder + "bert/hf", "cpu");
  Request request{.tokens = {5, 6}, .second_text = 2, .embedding = Pooling::kScores};
  EXPECT_THROW(classifier->submit(request), Error);
}

}  // namespace
}  // namespace millrace::classifier_test
