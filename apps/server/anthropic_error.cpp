#include "anthropic_error.h"

#include "base/json_writer.h"

namespace millrace::server {
namespace {

std::string_view anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

}  // namespace

bool is_anthropic_path(std::string_view path) {
  constexpr std::string_view kMessages = "/v1/messages";
  return path.starts_with(kMessages) && (path.size() == kMessages.size() || path[kMessages.size()] == '/');
}

std::string anthropic_error_body(const ApiError& error) {
  std::string out;
  JsonWriter json(out);
  json.begin_object().field("type", "error").key("error").begin_object();
  json.field("type", anthropic_type(error.status)).field("message", error.message);
  json.end_object().end_object();
  return out;
}

}  // namespace millrace::server
