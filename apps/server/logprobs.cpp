#include "logprobs.h"

#include <cmath>

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

void LogprobColumns::add(const Engine& engine, const Event& event, size_t text_offset) {
  JsonWriter::continuing(tokens_).value(engine.token_text(event.token));
  JsonWriter::continuing(logprobs_).value(finite(event.logprob));
  JsonWriter top = JsonWriter::continuing(tops_);
  top.begin_object();
  for (const auto& [token, logprob] : event.top) top.field(engine.token_text(token), finite(logprob));
  top.end_object();
  JsonWriter::continuing(offsets_).value(text_offset);
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
