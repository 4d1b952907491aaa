// Lark's grammars as regular expressions. What matches and what does not is what the package lark 1.3 says of
// the same grammars and texts (its Earley parser with dynamic_complete).
#include "grammar/lark.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/grammar.h"

namespace millrace::grammar {
namespace {

struct LarkCase {
  std::string grammar;
  std::vector<std::string> good, bad;
};

const LarkCase kLarkCases[] = {
    {"start: \"a\" | \"b\" \"c\"", {"a", "bc"}, {"", "b", "ab", "abc"}},
    {"start: (\"a\" | \"b\")+ [\"-\"] \".\"?", {"a", "ab-", "bb.", "a-."}, {"", "-", "a.-"}},
    {"// numbers\nstart: SIGN? INT (\".\" INT)?  // one\nSIGN: \"+\" | \"-\"\n%import common.INT\n",
     {"1", "-12.5", "+0"},
     {"1.", ".5", "--1", " 1"}},
    {"start: call\n     | word -> alone\ncall: word \"(\" word (\",\" word)* \")\"\nword: /[a-z]+/\n",
     {"f(a)", "f(a,b,c)", "abc"},
     {"f()", "f(a,)", "F(a)", "f(a"}},
    {"start: \"x\"~3 \"y\"~1..2", {"xxxy", "xxxyy"}, {"xxy", "xxx", "xxxyyy"}},
    {"start: \"Sel\"i \" \" \"a\"..\"f\"", {"sel a", "SEL f", "sEl c"}, {"sel g", "se a"}},
    {"?start: _line+\n!_line.2: KEY \"=\" /\\d{1,3}/ \"\\n\"\nKEY.-1: /[A-Z][A-Z0-9]*/\n",
     {"A=1\n", "AB2=123\nC=4\n"},
     {"A=1", "a=1\n", "A=1234\n"}},
    {"start: \"[\" (\"é\"\n    | \"(a.b)\") \"]\"", {"[é]", "[(a.b)]"}, {"[e]", "[(axb)]"}},
    {"%import common.CNAME -> ID\n%import common.ESCAPED_STRING\nstart: ID \": \" ESCAPED_STRING",
     {"a_1: \"x\"", "b: \"\\\"\""},
     {"1a: \"x\"", "a: \"x", "a:\"x\""}},
};

TEST(Lark, MatchesWhatLarkMatches) {
  for (const LarkCase& c : kLarkCases) {
    const auto grammar = compile_regex(lark_to_regex(c.grammar));
    for (const std::string& text : c.good) EXPECT_TRUE(matches(*grammar, text)) << c.grammar << "\n" << text;
    for (const std::string& text : c.bad) EXPECT_FALSE(matches(*grammar, text)) << c.grammar << "\n" << text;
  }
}

void expect_error(const std::string& grammar, ErrorCode code, const std::string& says) {
  try {
    lark_to_regex(grammar);
    ADD_FAILURE() << grammar;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
  }
}

TEST(Lark, SaysWhatItDoesNotDo) {
  const auto lacks = [](const std::string& grammar, const std::string& says) {
    expect_error(grammar, ErrorCode::kUnsupported, says);
  };
  lacks("start: \"a\" list\nlist: \"b\" list | \"c\"", "line 2: 'list' calls itself");
  lacks("start: \"a\"\n%ignore \" \"", "line 2: %ignore");
  lacks("start: pair{\"a\"}\npair{x}: x x", "template");
  lacks("start: /a/i", "flags");
  lacks("%import common.SQL_COMMENT\nstart: \"a\"", "common.SQL_COMMENT");
  lacks("start: \"a\"~100000", "10000");
  std::string doubling = "start: a0 a0\n";
  for (int i = 0; i < 20; ++i)
    doubling += "a" + std::to_string(i) + ": a" + std::to_string(i + 1) + " a" + std::to_string(i + 1) + "\n";
  lacks(doubling + "a20: \"xx\"", "bytes");
}

TEST(Lark, SaysWhatIsWrong) {
  const auto bad = [](const std::string& grammar, const std::string& says) {
    expect_error(grammar, ErrorCode::kBadInput, says);
  };
  bad("", "line 1: found no rule 'start'");
  bad("b: \"a\"", "found no rule 'start'");
  bad("start: \"a", "line 1: expected a closing \"");
  bad("start: \"a\"\nstart: \"b\"", "line 2: 'start' is defined twice");
  bad("start: \"a\" )", "expected the rule's end");
  bad("start: (\"a\"", "expected ')'");
  bad("start:\n  | other", "line 2: 'other' is not defined");
  bad("start: /(/", "line 1: pattern");
  bad("start: \"a\"~2..1", "maximum");
  bad("start \"a\"", "expected ':'");
  bad("start: *", "expected a text");
}

}  // namespace
}  // namespace millrace::grammar
