// For tests: a small vocabulary with all that makes masks hard (bytes, halves of characters, tokens that
// close several levels), and a model with random weights under a constraint.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "grammar/grammar.h"

namespace millrace::grammar {

inline std::vector<std::string> test_tokens() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  for (const char* text : {"{\"",
                           "\":",
                           "\": ",
                           "\", \"",
                           "\",",
                           "\"}",
                           "\"}}",
                           "\"]",
                           "\"]}",
                           "\"},",
                           "}}",
                           "]]",
                           "]}",
                           "}]",
                           "},{",
                           "}, {",
                           "null",
                           "true",
                           "false",
                           "nul",
                           "tr",
                           "fals",
                           "[]",
                           "{}",
                           "[[",
                           "{\"a",
                           "a",
                           "ab",
                           "abc",
                           "the",
                           " the",
                           "foo",
                           "bar",
                           "baz",
                           "foo\"",
                           "oo",
                           "ar\":",
                           "12",
                           "123",
                           "0.",
                           ".5",
                           "1e",
                           "-1",
                           "00",
                           ", ",
                           ",\n",
                           ",\n  ",
                           "{\n  \"",
                           "\n",
                           "\n    ",
                           "  ",
                           "    ",
                           "\\n",
                           "\\\"",
                           "\\u",
                           "\\u00",
                           "é",
                           "\xc3",
                           "\xe2\x82",
                           "\x82\xac",
                           "€",
                           "\xf0\x9f",
                           "\xf0\x9f\x98\x80",
                           "日本",
                           "d83d",
                           "2024",
                           "-0",
                           "T1",
                           ":0",
                           "Z\"",
                           "@",
                           ".com",
                           "abc\\",
                           "a\"b",
                           "x\", ",
                           "y\": ",
                           "\": [",
                           "\": {",
                           "\": \"",
                           "\":\"",
                           "[\"",
                           "[1",
                           ", 1",
                           "1,",
                           "1]",
                           "1}",
                           "aaaaaaaaaaaaaaaaaaaaaaaa",
                           "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                           "ééé",
                           "\"\"",
                           "\\\\"}) {
    tokens.emplace_back(text);
  }
  tokens.emplace_back("abc");  // twice: two tokens may have the same bytes
  tokens.emplace_back("");     // the end
  return tokens;
}

inline int32_t test_end_token() { return static_cast<int32_t>(test_tokens().size()) - 1; }

struct WalkResult {
  std::string text = {};
  bool ended = false;
};

// Tokens drawn from the mask until the end token. Past `patience` tokens it prefers what closes, so that
// recursion ends.
inline WalkResult random_walk(const std::shared_ptr<const Grammar>& grammar,
                              const std::shared_ptr<const Vocabulary>& vocabulary,
                              const std::vector<std::string>& tokens, uint64_t seed, int patience = 60,
                              int max_tokens = 3000) {
  std::mt19937_64 random(seed);
  const int32_t end = static_cast<int32_t>(tokens.size()) - 1;
  const auto constraint = constrain(grammar, vocabulary, {end});
  WalkResult result;
  std::vector<uint64_t> mask((tokens.size() + 63) / 64);
  std::vector<int32_t> allowed;
  for (int step = 0; step < max_tokens; ++step) {
    std::fill(mask.begin(), mask.end(), 0);
    constraint->allowed(mask);
    allowed.clear();
    for (int32_t t = 0; t <= end; ++t) {
      if ((mask[t / 64] >> (t % 64) & 1) != 0) allowed.push_back(t);
    }
    int32_t chosen = allowed[random() % allowed.size()];
    if (step > patience && random() % 4 != 0) {
      const auto is_allowed = [&](int32_t t) { return (mask[t / 64] >> (t % 64) & 1) != 0; };
      for (const int32_t t : {end, int32_t{'}'}, int32_t{']'}, int32_t{'"'}, int32_t{'1'}}) {
        if (!is_allowed(t)) continue;
        chosen = t;
        break;
      }
    }
    constraint->accept(chosen);
    if (chosen == end) {
      result.ended = true;
      break;
    }
    result.text += tokens[chosen];
  }
  return result;
}

}  // namespace millrace::grammar
