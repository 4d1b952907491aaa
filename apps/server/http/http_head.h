// The head of a request by RFC 9112, as strictly as it is written: what two readers could take for two
// different requests is refused, so that nothing behind a request can be smuggled past a proxy as another. No
// bytes, no sockets: lines in, a request and where its body ends out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "http.h"

namespace millrace::server {

struct HttpRefusal {
  int status;
  std::string message;
};
using MaybeRefusal = std::optional<HttpRefusal>;

// Finds where a line ends. Only CRLF ends one: a CR or an LF alone, or another control character, is refused.
class LineScanner {
 public:
  // The line at the beginning of `bytes`, without its CRLF; nothing while it is not whole. Called again with
  // more, it goes on where it stopped.
  std::optional<std::string_view> next(std::string_view bytes);
  const MaybeRefusal& refusal() const { return refusal_; }

 private:
  size_t looked_ = 0;
  MaybeRefusal refusal_;
};

struct HttpFraming {
  bool chunked = false;
  uint64_t length = 0;  // of a body that is not chunked
};

MaybeRefusal read_request_line(std::string_view line, HttpRequest& request);
MaybeRefusal read_field(std::string_view line, Headers& headers);
// When all fields are there: where the body ends, whom the request is for, what it expects. Fills in the
// rest.
MaybeRefusal read_framing(HttpRequest& request, HttpFraming& framing);
// A field that may not stand behind a body.
bool is_framing_field(std::string_view name);

}  // namespace millrace::server
