// Logprobs in the two shapes OpenAI has for them.
#pragma once

#include <string>

#include "base/json_writer.h"
#include "millrace/engine.h"

namespace millrace::server {

// Of chat and responses: {"token", "logprob", "bytes", "top_logprobs": [...]}.
void write_token_logprob(JsonWriter& json, const Engine& engine, const Event& event);

// Of completions: columns that grow.
class LogprobColumns {
 public:
  void add(const Engine& engine, const Event& event, size_t text_offset);
  bool empty() const { return tokens_.empty(); }
  // {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of what was added since the last call.
  void write(JsonWriter& json);

 private:
  std::string tokens_, logprobs_, tops_, offsets_;  // arrays in JSON, without their brackets
};

}  // namespace millrace::server
