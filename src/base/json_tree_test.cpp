// The tree is the one that nlohmann's own parser builds; limits are kept; time is linear in the text.
#include "base/json_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iterator>
#include <string>
#include <utility>

#include "base/work_budget.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;

std::string error_of(std::string_view text, const JsonLimits& limits = {}) {
  try {
    parse_json_tree(text, limits);
  } catch (const JsonTextError& error) {
    return error.what();
  }
  return "";
}

TEST(JsonTree, IsWhatTheLibraryBuilds) {
  const std::string_view texts[] = {"null",
                                    "true",
                                    " 1 ",
                                    "-1",
                                    "18446744073709551615",
                                    "1.5e3",
                                    "\"a\\u00e9\\n\\ud83d\\ude00\"",
                                    "[]",
                                    "{}",
                                    R"([1, [2, {"a": [], "b": {"c": null}}], "x"])",
                                    R"({"z": 1, "a": {"y": [true, false]}, "m": "", "": 0})"};
  for (const std::string_view text : texts) {
    EXPECT_EQ(parse_json_tree(text), Json::parse(text)) << text;
    EXPECT_EQ(parse_json_tree(text).dump(), Json::parse(text).dump()) << text;  // the order too
  }
  std::string many = "{";
  for (int i = 0; i < 1000; ++i)
    many += (i == 0 ? "\"" : ",\"") + std::to_string(i * 7919 % 1000) + "\":[" + std::to_string(i) + "]";
  many += "}";
  EXPECT_EQ(parse_json_tree(many).dump(), Json::parse(many).dump());
}

// Texts that are nearly JSON: taken or not, and what is made of them, as the library does.
TEST(JsonTree, TakesWhatTheLibraryTakes) {
  const std::string seeds[] = {
      R"({"a": [1, -2, 3.5e-7, 0, -0, 1E+9, true, false, null], "b\n\u00e9\ud83d\ude00": {"": "\"\\\/\b\f\r\t"}})",
      "[\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\", 9223372036854775807, -9223372036854775808, "
      "18446744073709551616, 1e-400]",
      "\xef\xbb\xbf [ 0.1 , [ ] , { } , \"\\u0000\" ]\n"};
  constexpr std::string_view kBytes = "{}[]\",:\\u0123456789abcdefeE+-. \n\t\x01\x7f\x80\xc3\xed\xff/tfn";
  uint64_t state = 1;
  const auto random = [&state](size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(state >> 33) % below;
  };
  size_t taken = 0;
  for (int i = 0; i < 60'000; ++i) {
    std::string text = seeds[random(std::size(seeds))];
    for (size_t changes = random(4); changes > 0; --changes) {
      const size_t at = random(text.size());
      const char byte = kBytes[random(kBytes.size())];
      if (random(3) == 0) {
        text.erase(at, 1 + random(3));
      } else if (random(2) == 0) {
        text.insert(at, 1, byte);
      } else {
        text[at] = byte;
      }
      if (text.empty()) text = "0";
    }
    const Json expected = Json::parse(text, nullptr, false);
    Json found = Json::value_t::discarded;
    try {
      found = parse_json_tree(text, {.last_key_wins = true});
    } catch (const JsonTextError&) {
    }
    ASSERT_EQ(found.is_discarded(), expected.is_discarded()) << text;
    if (found.is_discarded()) continue;
    ++taken;
    ASSERT_EQ(found.dump(), expected.dump()) << text;
  }
  EXPECT_GT(taken, 10'000u);
}

TEST(JsonTree, SaysWhereBadSyntaxIs) {
  EXPECT_NE(error_of("{\"a\": 1,\n \"b\": }").find("line 2, column 7"), std::string::npos);
  for (const char* bad :
       {"", "{", "[1,]", "{\"a\"}", "01", "1e400", "nul", "\"\\ud800\"", "\"\xff\"", "{} {}", "'a'"}) {
    EXPECT_NE(error_of(bad), "") << bad;
    EXPECT_FALSE(Json::accept(bad)) << bad;
  }
  EXPECT_LT(error_of("[" + std::string(1 << 20, '9') + "x").size(), 400u);
  // A number of a million digits is infinite, and is found to be so at once.
  EXPECT_NE(error_of(std::string(1 << 20, '9')).find("number overflow"), std::string::npos);
}

TEST(JsonTree, EqualKeysAreRefusedOrTheLastWins) {
  EXPECT_EQ(error_of(R"({"m": [{"a": 1, "b": 2, "a": 3}]})"), "'m[0]' has the key \"a\" twice");
  const JsonLimits last{.last_key_wins = true};
  std::string text = "{\"a\":0";
  for (int i = 0; i < 100; ++i) text += ",\"" + std::to_string(i % 40) + "\":" + std::to_string(i);
  text += ",\"a\":\"last\"}";
  EXPECT_EQ(parse_json_tree(text, last).dump(), Json::parse(text).dump());
  EXPECT_EQ(parse_json_tree(R"({"a": 1, "b": 2, "a": 3})", last).dump(), R"({"a":3,"b":2})");
}

TEST(JsonTree, KeepsItsLimits) {
  const JsonLimits small{.depth = 3, .values = 8, .keys = 3, .key_bytes = 4};
  EXPECT_EQ(error_of(R"([[[1]], [2]])", small), "");
  EXPECT_EQ(error_of(R"({"a": [1, {"b": []}]})", {.depth = 3}), "nested deeper than 3 levels at a[1].b");
  EXPECT_EQ(error_of("[1,2,3,4,5,6,7]", small), "");
  EXPECT_EQ(error_of("[1,2,3,4,5,6,7,8]", small), "more than 8 values");
  EXPECT_EQ(error_of(R"({"a":1,"b":2,"c":3})", small), "");
  EXPECT_EQ(error_of(R"({"a":1,"b":2,"c":3,"d":4})", small), "the object has more than 3 keys");
  EXPECT_EQ(error_of(R"({"x": [{"abcde": 1}]})", small), "'x[0]' has a key of 5 bytes, expected at most 4");
}

TEST(JsonTree, StopsWhenItsTimeIsUp) {
  std::string text = "[0";
  for (int i = 0; i < 100'000; ++i) text += ",0";
  text += "]";
  const WorkBudget budget({.deadline = std::chrono::steady_clock::now()});
  EXPECT_THROW(parse_json_tree(text), WorkEnded);
}

// Of this thread, whatever else the machine is doing.
double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
double seconds_for(const std::string& text) {
  const double start = processor_seconds();
  error_of(text, {.values = size_t{1} << 26, .keys = size_t{1} << 24});
  return processor_seconds() - start;
}

// Eight times the keys: about eight times the time, where a search for each would take 64 times as long.
TEST(JsonTree, IsLinearInTheKeys) {
  const auto keys = [](int n) {
    std::string text = "{";
    for (int i = 0; i < n; ++i) text += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":1";
    return text + "}";
  };
  double best = 1e9;
  for (int round = 0; round < 3; ++round)
    best = std::min(best, seconds_for(keys(160'000)) / seconds_for(keys(20'000)));
  EXPECT_LT(best, 24);
}

// Eight times the bytes of anything: at most about eight times the time, whatever the bytes are meant to
// cost.
TEST(JsonTree, IsLinearInAttacks) {
  using Shape = std::string (*)(size_t);
  static const auto repeated = [](const std::string& begin, const std::string& part, size_t bytes) {
    std::string text = begin;
    while (text.size() + part.size() < bytes) text += part;
    return text + (begin[0] == '[' ? "]" : "\"");
  };
  const std::pair<const char*, Shape> shapes[] = {
      {"nested arrays", [](size_t n) { return std::string(n / 2, '[') + std::string(n / 2, ']'); }},
      {"many arrays", [](size_t n) { return repeated("[[]", ",[]", n); }},
      {"one string", [](size_t n) { return "\"" + std::string(n, 'a') + "\""; }},
      {"escapes", [](size_t n) { return repeated("\"", "\\u00e9", n); }},
      {"numbers", [](size_t n) { return repeated("[1", ",1e300", n); }},
      {"beyond a double", [](size_t n) { return repeated("[1", ",1e400", n); }},
      {"one long number", [](size_t n) { return repeated("[1", "7", n); }},
      {"one long fraction", [](size_t n) { return repeated("[0.7", "7", n); }},
      {"spaces", [](size_t n) { return repeated("[1", " ", n); }}};
  for (const auto& [name, shape] : shapes) {
    const std::string small = shape(1 << 18), large = shape(8 << 18);
    double best = 1e9, least = 1e9;
    for (int round = 0; round < 3; ++round) {
      const double seconds = seconds_for(small);
      // What is refused at its first bytes is over before a clock can tell.
      best = std::min(best, seconds_for(large) / std::max(seconds, 1e-4));
      least = std::min(least, seconds);
    }
    EXPECT_LT(best, 24) << name;
    std::printf("%-18s %6.1f ms a quarter of a megabyte, eight are %.1f times as long\n", name, least * 1e3,
                best);
  }
}

}  // namespace
}  // namespace millrace
