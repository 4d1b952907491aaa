#include "http/http_parser.h"

#include <algorithm>

#include "http/chunked_body.h"
#include "http/http_head.h"

namespace millrace::server {

struct HttpParser::Impl {
  explicit Impl(const HttpLimits& l) : limits(l), chunks(l.header_bytes, l.body_bytes) {}
  size_t feed_head(std::string_view bytes);
  size_t feed_body(std::string_view bytes);
  void read_line(std::string_view line);
  void end_head();
  void fail(HttpRefusal why);
  bool check(const MaybeRefusal& refusal);

  const HttpLimits limits;
  State state = State::kHeader;
  LineScanner scanner;
  size_t header_bytes = 0;  // taken so far
  bool begun = false;       // behind the request line
  HttpRequest request;
  HttpFraming framing;
  uint64_t left = 0;  // of a body with a length
  std::string body;
  ChunkedBody chunks;
  int status = 0;
  std::string message;
};

void HttpParser::Impl::fail(HttpRefusal why) {
  state = State::kFailed;
  status = why.status;
  message = std::move(why.message);
}

bool HttpParser::Impl::check(const MaybeRefusal& refusal) {
  if (refusal) fail(*refusal);
  return !refusal;
}

size_t HttpParser::Impl::feed_head(std::string_view bytes) {
  size_t taken = 0;
  while (state == State::kHeader) {
    const std::string_view rest = bytes.substr(taken);
    const std::optional<std::string_view> line = scanner.next(rest);
    const size_t length = line ? line->size() + 2 : rest.size();
    if (header_bytes + length > limits.header_bytes) {
      fail({.status = 431,
            .message = "the header is larger than " + std::to_string(limits.header_bytes) + " bytes"});
    } else if (check(scanner.refusal()) && line) {
      read_line(*line);
    }
    if (!line) return taken;
    taken += length;
    header_bytes += length;
  }
  return taken;
}

void HttpParser::Impl::read_line(std::string_view line) {
  if (!begun) {
    if (line.empty() && header_bytes == 0) return;  // one empty line in front is tolerated (RFC 9112, 2.2)
    begun = check(read_request_line(line, request));
  } else if (line.empty()) {
    end_head();
  } else {
    check(read_field(line, request.headers));
  }
}

void HttpParser::Impl::end_head() {
  if (!check(read_framing(request, framing))) return;
  // A body announced as too long is refused before it is sent.
  if (framing.length > limits.body_bytes) {
    fail({.status = 413,
          .message = "the body is larger than " + std::to_string(limits.body_bytes) + " bytes"});
    return;
  }
  left = framing.length;
  request.has_body = framing.chunked || left > 0;
  state = request.has_body ? State::kBody : State::kDone;
}

size_t HttpParser::Impl::feed_body(std::string_view bytes) {
  if (framing.chunked) {
    const size_t taken = chunks.feed(bytes, body);
    if (check(chunks.refusal()) && chunks.done()) state = State::kDone;
    return taken;
  }
  const size_t taken = static_cast<size_t>(std::min<uint64_t>(left, bytes.size()));
  body.append(bytes.data(), taken);
  left -= taken;
  if (left == 0) state = State::kDone;
  return taken;
}

HttpParser::HttpParser(const HttpLimits& limits) : impl_(std::make_unique<Impl>(limits)) {}
HttpParser::~HttpParser() = default;
HttpParser::HttpParser(HttpParser&&) noexcept = default;
HttpParser& HttpParser::operator=(HttpParser&&) noexcept = default;

size_t HttpParser::feed(std::string_view bytes) {
  if (impl_->state == State::kHeader) return impl_->feed_head(bytes);
  return impl_->state == State::kBody ? impl_->feed_body(bytes) : 0;
}

HttpParser::State HttpParser::state() const { return impl_->state; }
const HttpRequest& HttpParser::head() const { return impl_->request; }
int HttpParser::error_status() const { return impl_->status; }
const std::string& HttpParser::error_message() const { return impl_->message; }

HttpRequest HttpParser::take() {
  HttpRequest request = std::move(impl_->request);
  request.body = std::move(impl_->body);
  return request;
}

}  // namespace millrace::server
