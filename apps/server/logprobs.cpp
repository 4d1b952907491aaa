#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace millrace::server {
namespace {

// JSON has no infinity; OpenAI gives this for what is all but impossible.
double finite(double logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

// Members of an object that is open: the token, how likely it was, its bytes.
void write_token(JsonWriter& json, const Engine& engine, int32_t token, double logprob) {
  const std::string bytes = engine.token_text(token);
  json.field("token", bytes).field("logprob", finite(logprob)).key("bytes").begin_array();
  for (const char c : bytes) json.value(static_cast<unsigned char>(c));
  json.end_array();
}

}  // namespace

void write_token_logprob(JsonWriter& json, const Engine& engine, const Event& event) {
  json.begin_object();
  write_token(json, engine, event.token, event.logprob);
  json.key("top_logprobs").begin_array();
  for (const auto& [token, logprob] : event.top) {
    json.begin_object();
    write_token(json, engine, token, logprob);
    json.end_object();
  }
  json.end_array().end_object();
}

size_t count_characters(std::string_view text) {
  const auto begins = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins));
}

void LogprobColumns::add(const Engine& engine, const TokenLogprob& token, bool known, size_t text_offset) {
  JsonWriter::continuing(tokens_).value(engine.token_text(token.token));
  JsonWriter::continuing(offsets_).value(text_offset);
  JsonWriter logprob = JsonWriter::continuing(logprobs_), top = JsonWriter::continuing(tops_);
  if (!known) {
    logprob.value(nullptr);
    top.value(nullptr);
    return;
  }
  logprob.value(finite(token.logprob));
  top.begin_object();
  for (const auto& [id, likely] : token.top) top.field(engine.token_text(id), finite(likely));
  top.end_object();
}

void LogprobColumns::add(const Engine& engine, const Event& event, size_t text_offset) {
  add(engine, {.token = event.token, .logprob = event.logprob, .top = event.top}, true, text_offset);
}

void LogprobColumns::add_prompt(const Engine& engine, std::span<const TokenLogprob> prompt,
                                std::string_view echo) {
  // Counted from the end: what a tokenizer puts in front (a token of its own, a space) is not in the text.
  std::vector<size_t> offsets(prompt.size());
  size_t offset = count_characters(echo);
  for (size_t i = prompt.size(); i-- > 0;) {
    offset -= std::min(offset, count_characters(engine.token_text(prompt[i].token)));
    offsets[i] = offset;
  }
  for (size_t i = 0; i < prompt.size(); ++i) add(engine, prompt[i], i > 0, offsets[i]);
}

void LogprobColumns::write(JsonWriter& json) {
  json.begin_object();
  json.key("tokens").begin_array().raw(tokens_).end_array();
  json.key("token_logprobs").begin_array().raw(logprobs_).end_array();
  json.key("top_logprobs").begin_array().raw(tops_).end_array();
  json.key("text_offset").begin_array().raw(offsets_).end_array();
  json.end_object();
  for (std::string* column : {&tokens_, &logprobs_, &tops_, &offsets_}) column->clear();
}

}  // namespace millrace::server
