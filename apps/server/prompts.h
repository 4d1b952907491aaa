// What stands for a prompt without a conversation: a string, strings, token ids, or lists of token ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json_fields.h"

namespace millrace::server {

struct Prompt {
  std::string text = {};  // or
  std::vector<int32_t> tokens = {};
  std::string path = {};  // of its field: prompt, or prompt[2]
};

// Throws ApiError{400} for what is none of these, for none at all, and for more than `max_prompts`.
std::vector<Prompt> read_prompts(const Fields& fields, std::string_view key, int32_t vocab,
                                 size_t max_prompts);

}  // namespace millrace::server
