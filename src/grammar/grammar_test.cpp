#include "grammar/grammar.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <thread>

#include "base/error.h"

namespace millrace::grammar {
namespace {

[[maybe_unused]] ErrorCode code_of(const std::function<void()>& f, std::string* message = nullptr) {
  try {
    f();
  } catch (const Error& e) {
    if (message != nullptr) *message = e.what();
    return e.code();
  }
  return ErrorCode::kInternal;
}

TEST(Gbnf, Matches) {
  const auto g = compile_gbnf("root ::= \"a\" b{2,3} [x-z]+ # comment\nb ::= \"b\" | \"é\"?\n");
  EXPECT_TRUE(matches(*g, "abbx"));
  EXPECT_TRUE(matches(*g, "aéx"));
  EXPECT_TRUE(matches(*g, "axyz"));
  EXPECT_FALSE(matches(*g, "abbbbx"));
  EXPECT_FALSE(matches(*g, "ab"));
  EXPECT_TRUE(matches_beginning(*g, "ab"));
}

TEST(Regex, Matches) {
  const auto g = compile_regex("^(\\d{3}-)?[a-f]+$");
  EXPECT_TRUE(matches(*g, "123-abc"));
  EXPECT_TRUE(matches(*g, "f"));
  EXPECT_FALSE(matches(*g, "123-"));
  EXPECT_FALSE(matches(*g, "12-a"));
}

TEST(JsonObject, Matches) {
  const auto g = compile_json_object();
  EXPECT_TRUE(matches(*g, R"({"a": [1, 2.5e3, {"b": null}], "c\u00e9": "x\n"})"));
  EXPECT_TRUE(matches(*g, "{}"));
  EXPECT_FALSE(matches(*g, "[]"));
  EXPECT_FALSE(matches(*g, "{\"a\": 01}"));
}

}  // namespace
}  // namespace millrace::grammar
