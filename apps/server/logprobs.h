// Logprobs in the two shapes OpenAI has for them.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/json_writer.h"
#include "millrace/engine.h"

namespace millrace::server {

// Of chat and responses: {"token", "logprob", "bytes", "top_logprobs": [...]}.
void write_token_logprob(JsonWriter& json, const Engine& engine, const Event& event);

// Code points of a text; of a piece of one, those that begin in it.
size_t count_characters(std::string_view text);

// Of completions: columns that grow.
class LogprobColumns {
 public:
  // text_offset: of the token in the choice's text, in characters.
  void add(const Engine& engine, const Event& event, size_t text_offset);
  // Tokens of a prompt, which is shown as `echo`. Nothing is known of how likely the first was.
  void add_prompt(const Engine& engine, std::span<const TokenLogprob> prompt, std::string_view echo);
  bool empty() const { return tokens_.empty(); }
  // {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of what was added since the last call.
  void write(JsonWriter& json);

 private:
  void add(const Engine& engine, const TokenLogprob& token, bool known, size_t text_offset);

  std::string tokens_, logprobs_, tops_, offsets_;  // arrays in JSON, without their brackets
};

}  // namespace millrace::server
