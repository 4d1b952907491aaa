#include "api_error.h"

#include <fmt/core.h>

#include <algorithm>

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

std::string without_paths(std::string_view text) {
  constexpr std::string_view kBefore = " \t\n\"'(<[{=:,`", kEnd = " \t\n\"')>]},;`";
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins = i == 0 || kBefore.find(text[i - 1]) != std::string_view::npos;
    const size_t end = std::min(text.find_first_of(kEnd, i), text.size());
    const std::string_view word = text.substr(i, end - i);
    const size_t colon = std::min(word.find(':'), word.size());  // path:line
    const size_t slash = word.substr(0, colon).rfind('/');
    const bool path =
        word.starts_with('/') || word.starts_with("./") || word.starts_with("../") || word.starts_with("~/");
    if (begins && path && slash != std::string_view::npos && slash + 1 < colon) {
      i += slash;  // the loop goes on behind it
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

ApiError to_api_error(ErrorCode code, const std::string& message) {
  const std::string text = without_paths(message);
  switch (code) {
    case ErrorCode::kBadInput:
      return {400, text};
    case ErrorCode::kUnsupported:
      return {400, text, "", "unsupported_value"};
    case ErrorCode::kNoMemory:
      return {503, text, "", "out_of_memory"};
    case ErrorCode::kBusy: {
      ApiError error(503, text, "", "busy");
      error.retry_after_s = 1;
      return error;
    }
    case ErrorCode::kIo:
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      break;
  }
  return {500, text, "", "server_error"};
}

// litellm looks for the first words, langchain and agents that speak to Anthropic for the others.
ApiError context_exceeded(size_t tokens, int64_t context, std::string path, bool at_least) {
  return {
      400,
      fmt::format(
          "This model's maximum context length is {} tokens. However, the prompt is too long: {} tokens > "
          "{} maximum in '{}'{}. Please reduce its length.",
          context, tokens, context, path, at_least || tokens > most_counted(context) ? " (at least)" : ""),
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
