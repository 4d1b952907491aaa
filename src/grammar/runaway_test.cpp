// Models that never stop by themselves: under a grammar of JSON each of them ends with a match, and whoever
// does not repeat himself for long is not held to anything but the grammar.
#include "grammar/runaway.h"

#include <gtest/gtest.h>

#include "grammar/compiled_grammar.h"
#include "grammar/grammar.h"
#include "grammar/test_walk.h"

namespace millrace::grammar {
namespace {

// Takes the first token of its list that is allowed, else the lowest.
class Stubborn {
 public:
  explicit Stubborn(std::vector<std::string> likes) : likes_(std::move(likes)), tokens_(test_tokens()) {
    vocabulary_ = make_vocabulary(tokens_);
  }

  // The text until it ends, or all of `max_tokens` of it.
  WalkResult write(const std::shared_ptr<const Grammar>& grammar, int max_tokens = 20'000) const {
    const int32_t end = test_end_token();
    auto constraint = constrain(grammar, vocabulary_, {end});
    WalkResult result;
    for (int i = 0; i < max_tokens; ++i) {
      std::vector<uint64_t> mask((tokens_.size() + 63) / 64);
      constraint->allowed(mask);
      if (i % 50 == 0) constraint = constraint->clone();
      const int32_t token = choose(mask);
      constraint->accept(token);
      if (token == end) {
        result.ended = true;
        break;
      }
      result.text += tokens_[static_cast<size_t>(token)];
    }
    return result;
  }

 private:
  int32_t choose(const std::vector<uint64_t>& mask) const {
    const auto is_allowed = [&](size_t t) { return (mask[t / 64] >> (t % 64) & 1) != 0; };
    for (const std::string& liked : likes_) {
      for (size_t t = 0; t < tokens_.size(); ++t) {
        if (tokens_[t] == liked && is_allowed(t)) return static_cast<int32_t>(t);
      }
    }
    for (size_t t = 0; t < tokens_.size(); ++t) {
      if (is_allowed(t)) return static_cast<int32_t>(t);
    }
    ADD_FAILURE() << "nothing is allowed";
    return test_end_token();
  }

  std::vector<std::string> likes_, tokens_;
  std::shared_ptr<const Vocabulary> vocabulary_;
};

struct Habit {
  const char* name;
  const char* schema;  // null: any object
  std::vector<std::string> likes;
  size_t least, most;  // bytes of the answer
};

TEST(Runaway, EndsWithAMatch) {
  const char* const kObject =
      R"({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]})";
  const char* const kList =
      R"({"type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
          "required": ["value", "next"]})";
  const std::vector<Habit> habits = {
      {"a word", kObject, {" the"}, 512, 600},
      {"blanks", kObject, {"    "}, 512, 800},
      {"lines in a string", kObject, {"\\n"}, 512, 600},
      {"half a character at a time", kObject, {"\xe2\x82", "\x82\xac", "\xac"}, 512, 700},
      {"numbers", R"({"type": "array", "items": {"type": "integer"}})", {"1,", "1"}, 2048, 2100},
      {"indented numbers", R"({"type": "array"})", {",\n  ", "1"}, 2048, 2200},
      {"short strings",
       R"({"type": "array", "items": {"type": "string"}})",
       {"\", \"", "[\"", "foo"},
       500,
       2200},
      {"empty strings", R"({"type": "array", "items": {"type": "string"}})", {"\", \"", "[\""}, 768, 900},
      {"lists in objects that all run on",
       R"({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "array", "items": {"type":
          "string"}}}, "required": ["x"]}})",
       {"\", \"", "[\"", "foo", "}, {", "{\""},
       1536,
       1900},
      {"arrays in arrays", "{}", {"[["}, 60, 1300},
      {"objects in objects", nullptr, {"\": {", "{\""}, 60, 2000},
      {"a list that goes on", kList, {"{", "1", "\": {"}, 60, 2400},
      {"invented names", nullptr, {"1,", "\": ", "a\"b", "foo\"", "\"", "1", "a"}, 500, 4000},
      {"a string that must be long", R"({"type": "string", "minLength": 2000})", {" the"}, 2002, 2010},
      {"a pattern", R"({"type": "string", "pattern": "^(abc)*$"})", {"abc"}, 256, 300},
      {"a string inside",
       R"({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}},
          "required": ["x"]}, "minItems": 2, "maxItems": 3})",
       {"the", "\"},{"},
       512,
       1000},
      {"strings that all run on",
       R"({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}},
          "required": ["x"]}})",
       {"the", "}, {", "{\""},
       1024,
       1400},
  };
  for (const Habit& habit : habits) {
    const auto grammar = habit.schema ? compile_json_schema(habit.schema) : compile_json_object();
    const WalkResult answer = Stubborn(habit.likes).write(grammar);
    EXPECT_TRUE(answer.ended) << habit.name << ": " << answer.text.substr(0, 200);
    EXPECT_TRUE(matches(*grammar, answer.text)) << habit.name;
    EXPECT_GE(answer.text.size(), habit.least) << habit.name;
    EXPECT_LE(answer.text.size(), habit.most) << habit.name << ": " << answer.text.substr(0, 200);
  }
}

// What the grammar allows is allowed after this text, token by token.
void expect_free(const std::shared_ptr<const Grammar>& grammar, const std::string& text) {
  const std::vector<std::string> tokens = test_tokens();
  const auto constraint = constrain(grammar, make_vocabulary(tokens), {test_end_token()});
  for (const char c : text) constraint->accept(static_cast<uint8_t>(c));
  std::vector<uint64_t> mask((tokens.size() + 63) / 64);
  constraint->allowed(mask);
  for (size_t t = 0; t + 1 < tokens.size(); ++t) {
    ASSERT_EQ((mask[t / 64] >> (t % 64) & 1) != 0, matches_beginning(*grammar, text + tokens[t]))
        << tokens[t] << " after ..." << text.substr(text.size() - 40);
  }
}

std::string repeated(const std::string& piece, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += piece;
  return out;
}

TEST(Runaway, LeavesWhatEndsByItselfAlone) {
  const auto anything = compile_json_schema("{}");
  expect_free(anything, "\"" + std::string(250, '-'));
  expect_free(anything, "{\"table\": \"" + repeated("| a | b | c |\\n", 30));
  expect_free(anything, "[" + repeated("0, ", 600));
  expect_free(anything, "[" + repeated("{\"x\": 0, \"y\": 0}, ", 100));
  expect_free(anything, "[" + repeated("\"yes\", ", 95));
  // A long text that only looks alike.
  std::string list = "\"";
  for (int i = 0; i < 250; ++i) list += "item " + std::to_string(i) + "; ";
  expect_free(anything, list);
  // A string that ran on is closed; the next one begins anew.
  expect_free(anything, "[\"" + std::string(256, 'x') + "\", \"" + std::string(250, 'x'));
  // Only JSON is watched.
  expect_free(compile_regex("[a-z]*"), std::string(2500, 'a'));
}

TEST(Runaway, ALoopThatStumblesIsOne) {
  Runaway runaway;
  const auto vocabulary = make_vocabulary(test_tokens());
  runaway.read("{\"a\": \"");
  size_t length = 0;
  for (bool narrows = false; !narrows && length < 5000; length += 42) {
    runaway.read(std::string(41, '1') + "2");
    std::vector<uint64_t> mask(vocabulary->num_words(), ~uint64_t{0});
    runaway.narrow(*vocabulary, mask);
    narrows = mask[0] != ~uint64_t{0};
  }
  EXPECT_LT(length, 1000u);
}

TEST(Runaway, WhatNeverRepeatsEndsToo) {
  Runaway runaway;
  const auto vocabulary = make_vocabulary(test_tokens());
  const auto narrows = [&] {
    std::vector<uint64_t> mask(vocabulary->num_words(), ~uint64_t{0});
    runaway.narrow(*vocabulary, mask);
    return mask[0] != ~uint64_t{0};
  };
  runaway.read("[");
  for (size_t i = 0; i + 1 < Runaway::kMaxItems; ++i) runaway.read(std::to_string(i * i) + ",");
  EXPECT_FALSE(narrows());
  runaway.read("1,");
  EXPECT_TRUE(narrows());
  runaway.read("2]");
  EXPECT_FALSE(narrows());
  runaway.read(",\"");
  uint64_t number = 1;
  for (size_t length = 0; length <= Runaway::kMaxStringBytes;) {
    number = number * 6364136223846793005u + 1442695040888963407u;
    const std::string digits = std::to_string(number);
    runaway.read(digits);
    length += digits.size();
  }
  EXPECT_TRUE(narrows());
}

}  // namespace
}  // namespace millrace::grammar
