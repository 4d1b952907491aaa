// Any bytes as what a stranger sends: a refusal with a status, or a request whose body is read as a chat. The
// first byte says how the rest is cut into reads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "api_error.h"
#include "conversation.h"
#include "http/http_parser.h"
#include "json_fields.h"
#include "prompts.h"
#include "touch.h"

namespace {

using namespace millrace;
using namespace millrace::server;

void read_body(const HttpRequest& request) {
  fuzz::touch(request.query_value("stream"));
  fuzz::touch(std::string(request.header("authorization")));
  try {
    const Json body = parse_object(request.body);
    const Fields fields(body);
    fields.number("temperature", 0, 2);
    fields.integer("max_tokens", 1, 1 << 28);
    if (fields.has("prompt")) {
      for (const Prompt& prompt : read_prompts(fields, "prompt", 1000, 16))
        fuzz::touch(prompt.path + prompt.text);
    }
    const chat::Conversation conversation = read_conversation(fields);
    for (const chat::Message& message : conversation.messages) fuzz::touch(message.role + message.content);
  } catch (const ApiError& error) {
    if (error.status < 400 || error.status >= 500) __builtin_trap();
    // What we say about it must itself be JSON.
    if (!Json::accept(error_body(error))) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t piece = 1 + data[0];
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const HttpLimits limits{.header_bytes = 2000, .body_bytes = 4000};
  HttpParser parser(limits);
  std::string buffer;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    buffer += bytes.substr(at, piece);
    bool moved = true;
    while (moved && !buffer.empty()) {
      const HttpParser::State before = parser.state();
      const size_t taken = parser.feed(buffer);
      if (taken > buffer.size()) __builtin_trap();
      buffer.erase(0, taken);
      moved = taken > 0 || parser.state() != before;
      if (parser.state() == HttpParser::State::kFailed) {
        if (parser.error_status() < 400) __builtin_trap();
        fuzz::touch(parser.error_message());
        return 0;
      }
      if (parser.state() == HttpParser::State::kDone) {
        read_body(parser.take());
        parser = HttpParser(limits);
      }
    }
    if (buffer.size() > limits.header_bytes + limits.body_bytes + piece) __builtin_trap();
  }
  return 0;
}
