#include "api_error.h"

#include <fmt/format.h>

#include "base/json_writer.h"

namespace millrace::server {

ApiError::ApiError(int http_status, std::string text, std::string path, std::string machine_code)
    : status(http_status), message(std::move(text)), param(std::move(path)), code(std::move(machine_code)) {}

namespace {

// OpenAI's: all that the client did wrong is one type, and the code says what.
std::string_view type_of(int status) {
  if (status == 429) return "requests";
  return status >= 500 ? "server_error" : "invalid_request_error";
}

}  // namespace

std::string error_body(const ApiError& error) {
  std::string out;
  JsonWriter json(out);
  json.begin_object().key("error").begin_object();
  json.field("message", error.message).field("type", type_of(error.status));
  json.text_or_null("param", error.param).text_or_null("code", error.code);
  json.end_object().end_object();
  return out;
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response{.status = error.status, .body = error_body(error)};
  response.error = std::make_shared<const ApiError>(error);
  if (error.retry_after_s > 0)
    response.headers.emplace_back("retry-after", std::to_string(error.retry_after_s));
  if (error.status == 401) response.headers.emplace_back("www-authenticate", "Bearer");
  return response;
}

ApiError to_api_error(ErrorCode code, const std::string& message) {
  switch (code) {
    case ErrorCode::kBadInput:
      return {400, message};
    case ErrorCode::kUnsupported:
      return {400, message, "", "unsupported_value"};
    case ErrorCode::kNoMemory:
      return {503, message, "", "out_of_memory"};
    case ErrorCode::kBusy: {
      ApiError error(503, message, "", "busy");
      error.retry_after_s = 1;
      return error;
    }
    case ErrorCode::kIo:
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      break;
  }
  return {500, message, "", "server_error"};
}

// litellm looks for the first words, langchain and agents that speak to Anthropic for the others.
ApiError context_exceeded(size_t tokens, int64_t context, std::string path) {
  return {
      400,
      fmt::format(
          "This model's maximum context length is {} tokens. However, the prompt is too long: {} tokens > "
          "{} maximum in '{}'. Please reduce its length.",
          context, tokens, context, path),
      path, "context_length_exceeded"};
}

std::string_view reason_phrase(int status) {
  switch (status) {
    case 100:
      return "Continue";
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return status < 400 ? "OK" : status < 500 ? "Bad Request" : "Internal Server Error";
  }
}

}  // namespace millrace::server
