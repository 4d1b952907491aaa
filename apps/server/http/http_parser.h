// HttpParser: bytes to one request, within limits. http_head.cpp reads the head, chunked_body.cpp a body in
// chunks; this puts them together. No socket and no coroutine: any compiler takes it, and the fuzzer runs it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "http.h"

namespace millrace::server {

struct HttpLimits {
  size_t header_bytes = 16 << 10;
  size_t body_bytes = 16 << 20;
};

class HttpParser {
 public:
  enum class State {
    kHeader,  // wants more of the header
    kBody,    // the header is there: head() may be read
    kDone,    // all of it is there
    kFailed,  // error_status(), error_message()
  };
  explicit HttpParser(const HttpLimits& limits);
  ~HttpParser();
  HttpParser(HttpParser&&) noexcept;
  HttpParser& operator=(HttpParser&&) noexcept;

  // Takes bytes and returns how many; the rest is to be given again with more behind it, or belongs to the
  // next request. Stops once behind the header, so that it can be looked at before the body.
  size_t feed(std::string_view bytes);
  State state() const;
  const HttpRequest& head() const;  // without the body
  HttpRequest take();               // once kDone
  int error_status() const;
  const std::string& error_message() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::server
