// What tests of images share: pictures, a question with some of them, and how far an answer is from
// transformers'.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "golden_reader.h"
#include "image/picture.h"
#include "millrace/engine.h"

namespace millrace::image_testing {

inline const std::string kPictures = golden::kRoot + "images/";

inline std::shared_ptr<const std::string> file(const std::string& name) {
  const std::vector<std::byte> bytes = golden::read_bytes(kPictures + name);
  return std::make_shared<const std::string>(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Whether this build has libpng and libjpeg-turbo; others say so of every file.
inline bool decodes() {
  try {
    image::decode(*file("mill.png"));
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    return false;
  }
}

inline int largest_difference(const image::Picture& a, const image::Picture& b) {
  EXPECT_EQ(a.width, b.width);
  EXPECT_EQ(a.height, b.height);
  EXPECT_EQ(a.rgb.size(), b.rgb.size());
  int worst = 0;
  for (size_t i = 0; i < std::min(a.rgb.size(), b.rgb.size()); ++i)
    worst = std::max(worst, std::abs(int{a.rgb[i]} - int{b.rgb[i]}));
  return worst;
}

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<std::pair<int32_t, double>> first;  // logprobs
  Usage usage;
};

// exchanged: with other pictures than the prompt's.
inline Request request_of(const nlohmann::json& prompt, bool exchanged = false) {
  Request request{.tokens = prompt.at("tokens").get<std::vector<int32_t>>()};
  for (const std::string& name : prompt.at("images").get<std::vector<std::string>>())
    request.images.push_back(file(!exchanged ? name : name == "square.png" ? "turned.png" : "square.png"));
  request.max_tokens = static_cast<int32_t>(prompt.at("next").size());
  request.ignore_end = true;
  request.sampling.temperature = 0;
  request.sampling.logprobs = 20;
  return request;
}

inline Answer answer_of(EventStream& stream) {
  Answer answer;
  while (std::optional<Event> event = stream.next()) {
    EXPECT_NE(event->kind, Event::Kind::kFailed) << event->error;
    if (event->kind != Event::Kind::kToken) answer.usage = event->usage;
    if (event->kind != Event::Kind::kToken) continue;
    if (answer.tokens.empty()) answer.first = event->top;
    answer.tokens.push_back(event->token);
  }
  return answer;
}

inline Answer ask(Engine& engine, const nlohmann::json& prompt, bool exchanged = false) {
  EventStream stream = engine.submit(request_of(prompt, exchanged));
  return answer_of(stream);
}

inline double worst_logprob(const Answer& answer, const nlohmann::json& prompt) {
  std::map<int32_t, double> found(answer.first.begin(), answer.first.end());
  double worst = 0;
  for (const nlohmann::json& entry : prompt.at("logprobs"))
    worst = std::max(worst, std::abs(found[entry.at(0)] - entry.at(1).get<double>()));
  return worst;
}

// Devices besides the CPU that MILLRACE_TEST_DEVICES names.
inline std::vector<std::string> further_devices() {
  std::vector<std::string> names = golden::device_names();
  names.erase(std::remove(names.begin(), names.end(), "cpu"), names.end());
  return names;
}

// On a device that rounds the inputs of its products: answers near transformers', and far from those to other
// pictures.
inline void expect_sight(Engine& engine, const nlohmann::json& prompts, const std::string& device) {
  SCOPED_TRACE(device);
  EXPECT_GE(engine.model().images.token, 0) << engine.model().images.refusal;
  for (const nlohmann::json& prompt : prompts) {
    const double own = worst_logprob(ask(engine, prompt), prompt);
    const double other = worst_logprob(ask(engine, prompt, /*exchanged=*/true), prompt);
    EXPECT_LT(own, 0.05);
    EXPECT_LT(2 * own, other);
    std::printf("[  figure  ] %s logprobs off by %.1e, with other pictures by %.1e\n", device.c_str(), own,
                other);
  }
}

// Through the prefix cache, for a prompt of some 40 tokens before the first of its images.
inline void expect_images_known_by_content(Engine& engine, Engine& fresh, const nlohmann::json& prompt) {
  const Answer first = ask(engine, prompt), again = ask(engine, prompt);
  const Answer other = ask(engine, prompt, /*exchanged=*/true);
  EXPECT_EQ(first.usage.cached_tokens, 0);
  EXPECT_GT(again.usage.cached_tokens, 80);
  EXPECT_EQ(first.first, again.first);
  EXPECT_LE(other.usage.cached_tokens, 42);
  EXPECT_EQ(other.first, ask(fresh, prompt, /*exchanged=*/true).first);
}

// The bits of `expected`, an answer for each prompt.
inline void expect_answers(Engine& engine, const nlohmann::json& prompts,
                           const std::vector<Answer>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const Answer answer = ask(engine, prompts[i]);
    EXPECT_EQ(answer.tokens, expected[i].tokens);
    EXPECT_EQ(answer.first, expected[i].first);
  }
}

}  // namespace millrace::image_testing
