// What tests/grammar_suite_test.py talks to: one JSON request per line in, one answer per line out.
//   {"schema": ..., "open": true, "texts": [...], "walks": n, "seed": s}  ("regex" or "gbnf" with a text in
//   place of "schema"; "open": objects are as the standard has them)
//   -> {"error": "unsupported" | "bad_input", "message": ...}
//    | {"matches": [true, ...], "walks": ["...", ...]}   a walk that did not end is null
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "grammar/grammar.h"
#include "grammar/test_walk.h"

namespace {

using Json = nlohmann::ordered_json;
namespace grammar = millrace::grammar;

Json answer(const Json& request, const std::shared_ptr<const grammar::Vocabulary>& vocabulary,
            const std::vector<std::string>& tokens) {
  std::shared_ptr<const grammar::Grammar> compiled;
  if (request.contains("schema")) {
    const bool open = request.value("open", false);
    compiled = grammar::compile_json_schema(request["schema"].dump(),
                                            open ? grammar::Objects::kOpen : grammar::Objects::kClosed);
  } else if (request.contains("regex")) {
    compiled = grammar::compile_regex(request["regex"].get<std::string>());
  } else if (request.contains("gbnf")) {
    compiled = grammar::compile_gbnf(request["gbnf"].get<std::string>());
  } else {
    compiled = grammar::compile_json_object();
  }
  Json result = {{"matches", Json::array()}, {"walks", Json::array()}};
  for (const Json& text : request.value("texts", Json::array())) {
    result["matches"].push_back(grammar::matches(*compiled, text.get<std::string>()));
  }
  const uint64_t seed = request.value("seed", uint64_t{1});
  for (int i = 0; i < request.value("walks", 0); ++i) {
    const grammar::WalkResult walk = grammar::random_walk(compiled, vocabulary, tokens, seed * 1000 + i);
    result["walks"].push_back(walk.ended ? Json(walk.text) : Json());
  }
  return result;
}

}  // namespace

int main() {
  const std::vector<std::string> tokens = grammar::test_tokens();
  const auto vocabulary = grammar::make_vocabulary(tokens);
  for (std::string line; std::getline(std::cin, line);) {
    Json result;
    try {
      result = answer(Json::parse(line), vocabulary, tokens);
    } catch (const millrace::Error& error) {
      const bool unsupported = error.code() == millrace::ErrorCode::kUnsupported;
      result = {{"error", unsupported ? "unsupported" : "bad_input"}, {"message", error.what()}};
    } catch (const std::exception& error) {
      result = {{"error", "internal"}, {"message", error.what()}};
    }
    std::cout << result.dump() << std::endl;
  }
  return 0;
}
