// ApiError: what a client did wrong or cannot have, with the HTTP status and OpenAI's error object. Thrown by
// whatever reads a request; caught where requests are handled (api.cpp) and nowhere else.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "http.h"
#include "millrace/error.h"

namespace millrace::server {

struct ApiError : std::exception {
  ApiError(int http_status, std::string text, std::string path = {}, std::string machine_code = {});
  const char* what() const noexcept override { return message.c_str(); }

  int status;
  std::string message;
  std::string param;  // path of the offending field, e.g. messages[0].role; empty: null
  std::string code;   // for programs, e.g. model_not_found; empty: null
  int retry_after_s = 0;
};

// {"error": {"message", "type", "param", "code"}}; the type follows from the status. An event of an event
// stream is the same.
std::string error_body(const ApiError& error);
// What the engine refused: bad input 400, does not fit 400 or 503, busy 503, a fault of ours 500. Without
// paths.
ApiError to_api_error(ErrorCode code, const std::string& message);
// What `work` gives. Where it refuses its input, that is said of the field `path`.
template <typename Work>
auto blaming(std::string_view path, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    const ApiError answer = to_api_error(error.code(), error.what());
    if (answer.status != 400) throw;
    throw ApiError(400, answer.message, std::string(path),
                   answer.code.empty() ? "invalid_value" : answer.code);
  }
}
// Of each file's path only its name: where files are is nobody's business.
std::string without_paths(std::string_view text);

// A prompt longer than the context, in the words and with the code that clients look for. `path`: the field
// it came from. `at_least`: it was not counted to its end, as none is that has more than most_counted.
ApiError context_exceeded(size_t tokens, int64_t context, std::string path, bool at_least = false);
// So many tokens of a prompt are counted, for those who want to know how much is too much.
constexpr size_t most_counted(int64_t context) { return 2 * static_cast<size_t>(context); }

HttpResponse error_response(const ApiError& error);

std::string_view reason_phrase(int status);

}  // namespace millrace::server
