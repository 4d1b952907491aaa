#include "prompts.h"

#include <fmt/core.h>

#include "base/work_budget.h"

namespace millrace::server {
namespace {

std::vector<int32_t> read_tokens(const Json& list, const std::string& path, int32_t vocab) {
  std::vector<int32_t> tokens;
  tokens.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    spend_work(1);
    const Json& value = list[i];
    if (!value.is_number_integer()) wrong_type(element_path(path, i), value, "a token id");
    if (value.is_number_unsigned() ? value.get<uint64_t>() >= static_cast<uint64_t>(vocab)
                                   : value.get<int64_t>() < 0) {
      bad_field(element_path(path, i), fmt::format("found {}, expected 0 to {}", value.dump(), vocab - 1));
    }
    tokens.push_back(value.get<int32_t>());
  }
  if (tokens.empty()) bad_field(path, "found no tokens, expected at least one");
  return tokens;
}

Prompt read_prompt(const Json& value, std::string path, int32_t vocab, std::string_view expected) {
  Prompt prompt;
  if (value.is_string()) {
    prompt.text = value.get<std::string>();
    if (prompt.text.empty()) bad_field(path, "found an empty string, expected some text");
  } else if (value.is_array()) {
    prompt.tokens = read_tokens(value, path, vocab);
  } else {
    wrong_type(path, value, expected);
  }
  prompt.path = std::move(path);
  return prompt;
}

}  // namespace

std::vector<Prompt> read_prompts(const Fields& fields, std::string_view key, int32_t vocab,
                                 size_t max_prompts) {
  const std::string path = fields.path_of(key);
  const Json* value = fields.find(key);
  if (value == nullptr)
    bad_field(path, "is missing, expected a string or an array", "missing_required_parameter");
  const bool list = value->is_array();
  if (list && value->empty())
    bad_field(path, "found an empty array, expected at least one prompt", "empty_array");
  if (!list || (*value)[0].is_number()) return {read_prompt(*value, path, vocab, "a string or an array")};
  if (value->size() > max_prompts) {
    bad_field(path, fmt::format("found {} prompts, expected at most {}", value->size(), max_prompts),
              "array_above_max_length");
  }
  std::vector<Prompt> prompts;
  for (size_t i = 0; i < value->size(); ++i) {
    prompts.push_back(
        read_prompt((*value)[i], element_path(path, i), vocab, "a string or an array of token ids"));
  }
  return prompts;
}

}  // namespace millrace::server
