#include "logprobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "json_text.h"

namespace millrace::server {
namespace {

// JSON has no infinity; OpenAI gives this for what is all but impossible.
double finite(double logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

std::string one_token(const Engine& engine, int32_t token, double logprob) {
  const std::string bytes = engine.token_text(token);
  std::string list;
  for (const char c : bytes) {
    if (!list.empty()) list.push_back(',');
    list += std::to_string(static_cast<unsigned char>(c));
  }
  return fmt::format(R"("token":{},"logprob":{},"bytes":[{}])", json_string(valid_utf8(bytes)),
                     finite(logprob), list);
}

}  // namespace

std::string token_logprob_json(const Engine& engine, const Event& event) {
  std::string tops;
  for (const auto& [token, logprob] : event.top) {
    if (!tops.empty()) tops.push_back(',');
    tops += "{" + one_token(engine, token, logprob) + "}";
  }
  return fmt::format(R"({{{},"top_logprobs":[{}]}})", one_token(engine, event.token, event.logprob), tops);
}

void LogprobColumns::add(const Engine& engine, const Event& event, size_t text_offset) {
  tokens_.push_back(json_string(valid_utf8(engine.token_text(event.token))));
  logprobs_.push_back(fmt::format("{}", finite(event.logprob)));
  std::string top;
  for (const auto& [token, logprob] : event.top) {
    if (!top.empty()) top.push_back(',');
    top += fmt::format("{}:{}", json_string(valid_utf8(engine.token_text(token))), finite(logprob));
  }
  tops_.push_back("{" + top + "}");
  offsets_.push_back(std::to_string(text_offset));
}

std::string LogprobColumns::take() {
  std::string out = fmt::format(
      R"({{"tokens":[{}],"token_logprobs":[{}],"top_logprobs":[{}],"text_offset":[{}]}})",
      fmt::join(tokens_, ","), fmt::join(logprobs_, ","), fmt::join(tops_, ","), fmt::join(offsets_, ","));
  for (auto* column : {&tokens_, &logprobs_, &tops_, &offsets_}) column->clear();
  return out;
}

}  // namespace millrace::server
