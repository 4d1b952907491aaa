// tokenizer.json as read: the two large members in flat form, the rest as a JSON value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace millrace {

struct TokenizerJson {
  nlohmann::json rest;  // without model.vocab and model.merges where they are an object and an array
  bool has_vocab = false;
  bool has_merges = false;
  std::vector<std::pair<std::string, int64_t>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;
};

// Checks the syntax and the types of vocab and merges. Throws Error{kBadInput} naming `source`.
TokenizerJson parse_tokenizer_json(std::string_view text, const std::string& source);

}  // namespace millrace
