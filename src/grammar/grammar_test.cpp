// The languages (GBNF, regular expressions, JSON), their limits and messages, and the cache of grammars.
// JSON Schema against the official suite: tests/grammar_suite_test.py.
#include "grammar/grammar.h"

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/work_budget.h"

namespace millrace::grammar {
namespace {

using Texts = std::vector<std::string>;

void expect_language(const std::shared_ptr<const Grammar>& grammar, const Texts& in, const Texts& out) {
  for (const std::string& text : in) {
    EXPECT_TRUE(matches(*grammar, text)) << text;
    for (size_t n = 0; n <= text.size(); ++n)
      EXPECT_TRUE(matches_beginning(*grammar, text.substr(0, n))) << text;
  }
  for (const std::string& text : out) EXPECT_FALSE(matches(*grammar, text)) << text;
}

template <class F>
void expect_error(F f, ErrorCode code, const std::string& message) {
  try {
    f();
    ADD_FAILURE() << "no error, expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos)
        << error.what() << "\n  expected: " << message;
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
  }
}

double cpu_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

TEST(Gbnf, Language) {
  expect_language(compile_gbnf("root ::= \"a\" b{2,3} [x-z]+ # comment\nb ::= \"b\" | \"é\"?\n"),
                  {"abbx", "aéx", "axyz", "abébz"}, {"abbbbx", "ab", "", "aéééé"});
  expect_language(compile_gbnf("root ::= (\"x\" | y)* \"\\n\"\n  y\n ::= [^\\x00-\\x7f] # beyond\n"),
                  {"\n", "xx\n", "x日x\n"}, {"a\n", "x", "\xc3\n"});
  expect_language(compile_gbnf("root ::= .{2} [-a\\]]{,2} [+-]?"), {"日x", "\n\n-]", "abaa+", "ab-"},
                  {"a", "abaaa", "ab++"});
  // Recursion: balanced brackets, palindromes, and an ambiguous sum.
  expect_language(compile_gbnf("root ::= \"(\" root \")\" root | \"\""), {"", "()", "(()())()"},
                  {"(", ")(", "(()"});
  expect_language(compile_gbnf("root ::= \"a\" root \"a\" | \"b\" root \"b\" | \"\""), {"abba", "aabbaa"},
                  {"aba", "ab"});
  expect_language(compile_gbnf("root ::= t (\"+\" root)?\nt ::= [0-9]+ | \"(\" root \")\""), {"1+(2+33)+4"},
                  {"1+", "(1"});
}

TEST(Gbnf, RulesThatAreThemselves) {
  // A rule that is among others itself says nothing by it; one that begins with itself is refused.
  expect_language(compile_gbnf("root ::= root | \"x\""), {"x"}, {"", "xx"});
  expect_error([] { compile_gbnf("root ::= root \"x\" | \"x\""); }, ErrorCode::kUnsupported,
               "rule 'root' calls itself before it has read anything");
  expect_error([] { compile_gbnf("root ::= \"y\" a\na ::= e b \"1\" | \"2\"\nb ::= a\ne ::= \"\" | \"e\""); },
               ErrorCode::kUnsupported, "left recursion");
  // What can never end is as if it were not there.
  expect_language(compile_gbnf("root ::= \"x\" | \"y\" never\nnever ::= \"z\" never"), {"x"}, {"y", "yz"});
  expect_error([] { compile_gbnf("root ::= \"y\" root"); }, ErrorCode::kBadInput, "no text at all matches");
}

TEST(Gbnf, Messages) {
  const auto bad = [](const std::string& text, const std::string& message) {
    expect_error([&] { compile_gbnf(text); }, ErrorCode::kBadInput, message);
  };
  bad("root ::= \"a\n\"", "line 1: found byte 0x0a, expected the literal's closing '\"'");
  bad("\nroot ::= a", "line 2: rule 'a' is called but not defined");
  bad("root ::= \"a\"\n\nroot ::= \"b\"", "line 3: rule 'root' is defined twice");
  bad("a ::= \"a\"", "has no rule 'root'");
  bad("root ::= (\"a\"", "found the end, expected ')'");
  bad("root ::= [z-a]", "ends before it begins");
  bad("root ::= \"a\"{3,2}", "{3,2}");
  bad("root ::= \"\\q\"", "'\\' before 'q'");
  bad("root ::= \"\xff\"", "expected UTF-8");
  bad("root ::= %", "found '%'");
  bad("", "has no rule 'root'");
}

TEST(Regex, Language) {
  expect_language(compile_regex("^(\\d{3}-)?[a-f]+$"), {"123-abc", "f"}, {"123-", "12-a", "", "g"});
  expect_language(compile_regex("a|b*c|(?:de){2,}|"), {"a", "c", "bbc", "dede", "dedede", ""},
                  {"b", "de", "ac"});
  expect_language(compile_regex("[^a-z\\d]\\.\\w\\s?\\x41\\u00e9\\u{1F600}"), {"-._Aé😀", "日.a Aé😀"},
                  {"a.aAé😀", "-xaAé😀"});
  expect_language(compile_regex(".*?[\\w-]+"), {"a", "日本-"}, {"", "a\n"});
  expect_language(compile_regex("(^a|b$)"), {"a", "b"}, {"", "ab"});
  expect_language(compile_regex("x{,2}{y"), {"x{,2}{y"}, {"xx{y"});
  expect_language(compile_regex("[\\]\\\\^-]+"), {"]\\^-"}, {"["});
  expect_language(compile_regex("(?<year>[0-9]{4})(?P<x>-)"), {"2024-"}, {"2024"});
  expect_language(compile_regex("(a?){30}a{30}"), {std::string(30, 'a'), std::string(60, 'a')},
                  {std::string(61, 'a')});
}

TEST(Regex, Messages) {
  const auto refused = [](const std::string& pattern, const std::string& message) {
    expect_error([&] { compile_regex(pattern); }, ErrorCode::kUnsupported, message);
  };
  refused("ab(?=c)", "regex: offset 2: lookahead is not supported");
  refused("a(?<!c)", "offset 1: lookbehind");
  refused("(a)\\1", "offset 3: a back-reference");
  refused("a\\b", "offset 1: the word boundary '\\b'");
  refused("\\p{L}", "offset 0: a Unicode property");
  refused("(?i)a", "offset 0: the group '(?i'");
  refused("a{1,1000000}", "repeating more than 100000 times");
  refused("((a{100}){100}){100}", "takes more than 100000 states");
  const auto bad = [](const std::string& pattern, const std::string& message) {
    expect_error([&] { compile_regex(pattern); }, ErrorCode::kBadInput, message);
  };
  bad("a(b", "offset 3: found the end, expected ')'");
  bad("a)", "an unmatched ')'");
  bad("*a", "a quantifier with nothing before it");
  bad("a**", "a quantifier after a quantifier");
  bad("[a", "closing ']'");
  bad("[z-a]", "ends before it begins");
  bad("a\\", "a character after '\\'");
  bad("a{3,1}", "maximum is below");
  bad("\xc3(", "expected UTF-8");
  bad("[^\\u{0}-\\u{10FFFF}]", "no text at all matches");
}

// Nesting and alternatives that would double the work at every level, and automata that have no small
// deterministic form: time and size stay small, or it is refused. (A second when right, years when
// exponential, which is how ctest's limit finds it.)
TEST(Regex, DoesNotBlowUp) {
  std::string nested = "a";
  for (int i = 0; i < 60; ++i) nested = "(" + nested + ")*";
  expect_language(compile_regex(nested), {"", "aaa"}, {"b"});
  expect_language(compile_regex("(a|b)*a(a|b){40}"), {"a" + std::string(40, 'b')}, {std::string(41, 'b')});
  expect_error([] { compile_regex("((a{0,50}){0,50}){0,30}"); }, ErrorCode::kUnsupported,
               "repetitions in repetitions");
}

TEST(Ambiguity, StacksAreShared) {
  // 2^n ways to read a^n; the set of configurations must stay small.
  const auto grammar = compile_gbnf("root ::= x \"1\" | y \"2\" | \"\"\nx ::= \"a\" root\ny ::= \"a\" root");
  EXPECT_TRUE(matches_beginning(*grammar, std::string(300, 'a')));
  EXPECT_TRUE(matches(*grammar, std::string(150, 'a') + std::string(150, '1')));
  EXPECT_FALSE(matches(*grammar, std::string(150, 'a') + std::string(151, '2')));
}

TEST(JsonObject, Language) {
  expect_language(compile_json_object(),
                  {R"({"a": [1, 2.5e3, {"b": null}], "c\u00e9": "x\n"})", "{}", R"({"a":-0.5E-2})",
                   "{\n  \"a\": [\n    true,\n    false\n  ]\n}", R"({"\ud83d\ude00": "日本"})"},
                  {"[]", R"({"a": 01})", R"({"a": .5})", R"({"a": 1.})", R"({a: 1})", R"({"a": 1,})",
                   R"({"\ud83d": 1})", "{\"\xff\": 1}", "{\"\n\": 1}", R"({"a": 1} )", R"( {"a": 1})",
                   "{\"\xed\xa0\x80\": 1}", R"({"a": 1234567890123456})"});
}

TEST(Schema, Messages) {
  const auto refused = [](const std::string& schema, const std::string& message) {
    expect_error([&] { compile_json_schema(schema); }, ErrorCode::kUnsupported, message);
  };
  refused(R"({"properties": {"a/b": {"not": {"const": 1}}}})",
          "schema: #/properties/a~1b/not: only 'type' can be negated");
  refused(R"({"$ref": "other.json"})", "schema: #/$ref: refers to 'other.json'");
  refused(R"({"items": {"uniqueItems": true}})", "#/items/uniqueItems");
  refused(R"({"oneOf": [{"type": "integer"}, {"minimum": 2}]})", "#/oneOf: branches 0 and 1 may both match");
  refused(R"x({"type": "string", "pattern": "a(?=b)"})x", "schema: #/pattern: offset 1: lookahead");
  refused(R"({"type": "string", "maxLength": 100000000})", "states");
  refused(R"({"type": "array", "minItems": 100000})", "#/minItems: counts more than 10000");
  refused(R"({"type": "number", "multipleOf": 0.123456789})", "a step of 0.123456789");
  refused(std::string(600, '[') + std::string(600, ']'), "nested deeper than 512 levels");
  const auto bad = [](const std::string& schema, const std::string& message) {
    expect_error([&] { compile_json_schema(schema); }, ErrorCode::kBadInput, message);
  };
  bad("{", "schema: offset 2: not JSON");
  bad("[]", "schema: #: found array, expected a schema");
  bad(R"({"type": "strin"})", "schema: #/type: found 'strin'");
  bad(R"({"properties": {"a": 3}})", "#/properties/a: found number, expected a schema");
  bad(R"({"type": "array", "minItems": -1})", "#/minItems: expected a count");
  bad(R"({"$ref": "#/$defs/x"})", "#/$ref: refers to '#/$defs/x', which is not there");
  bad(R"({"type": "integer", "minimum": 3, "maximum": 2})", "no text at all matches");
  bad(R"({"$ref": "#"})", "no text at all matches");
  bad(R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})",
      "no text at all matches");
}

TEST(Schema, StrictObjectsHaveThePropertiesNamed) {
  for (const std::string others : {"true", "{}"}) {
    const std::string schema = R"({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
        "additionalProperties": )" +
                               others + "}";
    const Texts named = {R"({"a":1})"}, further = {R"({"a":1,"b":2})"};
    expect_language(compile_json_schema(schema), {named[0], further[0]}, {});
    expect_language(compile_json_schema(schema, Objects::kStrict), named, further);
  }
  // A map says what it holds, and an object of which nothing is named holds anything.
  expect_language(
      compile_json_schema(R"({"type": "object", "additionalProperties": {"const": 2}})", Objects::kStrict),
      {R"({"b":2})"}, {R"({"b":1})"});
  expect_language(
      compile_json_schema(R"({"type": "object", "additionalProperties": true})", Objects::kStrict),
      {"{}", R"({"b":2})"}, {});
}

TEST(Schema, ManyOptionalPropertiesStaySmall) {
  std::string schema = R"({"type": "object", "additionalProperties": false, "properties": {)";
  for (int i = 0; i < 200; ++i)
    schema += (i > 0 ? ", " : "") + ("\"property_" + std::to_string(i) + "\": {\"type\": \"string\"}");
  const auto grammar = compile_json_schema(schema + "}}");
  expect_language(grammar, {"{}", R"({"property_3": "x", "property_150": "y"})"},
                  {R"({"property_4": "", "property_3": ""})"});
}

// What would take long is refused by a look at its size, or stopped when its time is up.
// Soon: in less than the time that a schema of 1,000 properties takes to compile.
TEST(Schema, LargeOnesAreRefusedSoon) {
  const auto properties_of = [](int n) {
    std::string schema = R"({"type": "object", "properties": {)";
    for (int i = 0; i < n; ++i)
      schema += (i > 0 ? ",\"p" : "\"p") + std::to_string(i) + R"(": {"type": "string"})";
    return schema + "}}";
  };
  const double before = cpu_seconds();
  compile_json_schema(properties_of(1000));
  const double soon = cpu_seconds() - before;
  const auto refused_soon = [soon](const std::string& schema, const char* part) {
    const double start = cpu_seconds();
    try {
      compile_json_schema(schema);
      ADD_FAILURE() << "compiled: " << schema.substr(0, 80);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_LT(cpu_seconds() - start, soon) << schema.substr(0, 80);
  };
  std::string all = R"({"allOf": [)";
  for (int i = 0; i < 20; ++i)
    all += (i > 0 ? "," : "") + std::string(R"({"anyOf": [{"type": "string"}, {"type": "object"}]})");
  refused_soon(all + "]}", "alternatives");
  refused_soon(properties_of(40'000), "more than 10000 properties");
  std::string many = R"({"allOf": [{})";
  for (int i = 0; i < 50'000; ++i) many += ",{}";
  refused_soon(many + "]}", "schemas for one value");
}

TEST(GrammarCache, ACompilationThatIsStoppedLeavesNothing) {
  GrammarCache cache;
  const std::string pattern = "(a|b|ab){1,400}c{1,300}";
  {
    const WorkBudget budget({.deadline = std::chrono::steady_clock::now()});
    EXPECT_THROW(cache.get(GrammarCache::Kind::kRegex, pattern), WorkEnded);
  }
  EXPECT_EQ(cache.size(), 0u);
  expect_language(cache.get(GrammarCache::Kind::kRegex, pattern), {"abc", "aabbccc"}, {"c", "ab"});
}

TEST(GrammarCache, KeepsWhatWasUsedLast) {
  GrammarCache cache(2);
  const auto a = cache.get(GrammarCache::Kind::kRegex, "a");
  const auto b = cache.get(GrammarCache::Kind::kRegex, "b");
  EXPECT_EQ(cache.get(GrammarCache::Kind::kRegex, "a"), a);
  cache.get(GrammarCache::Kind::kGbnf, "root ::= \"c\"");  // drops b
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(cache.get(GrammarCache::Kind::kRegex, "a"), a);
  EXPECT_NE(cache.get(GrammarCache::Kind::kRegex, "b"), b);
  EXPECT_EQ(cache.get(GrammarCache::Kind::kJsonObject, "x"), cache.get(GrammarCache::Kind::kJsonObject, "y"));
  EXPECT_THROW(cache.get(GrammarCache::Kind::kJsonSchema, "["), Error);
}

TEST(GrammarCache, IsBoundedInBytes) {
  GrammarCache cache(1000, 200'000);
  for (int i = 0; i < 50; ++i)
    cache.get(GrammarCache::Kind::kRegex, "[a-z]{" + std::to_string(i + 500) + "}");
  EXPECT_LT(cache.size(), 20u);
  EXPECT_GE(cache.size(), 1u);
}

}  // namespace
}  // namespace millrace::grammar
