#include "http/http_parser.h"

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

namespace millrace::server {

namespace http = boost::beast::http;

struct HttpParser::Impl {
  explicit Impl(const HttpLimits& l) : limits(l) {
    parser.header_limit(static_cast<std::uint32_t>(l.header_bytes));
    parser.body_limit(l.body_bytes);
  }
  void read_header();
  void fail(boost::system::error_code error);

  HttpLimits limits;
  http::request_parser<http::string_body> parser;
  State state = State::kHeader;
  HttpRequest head;
  int status = 0;
  std::string message;
};

void HttpParser::Impl::read_header() {
  const auto& message_in = parser.get();
  const auto text = [](auto view) { return std::string(view.data(), view.size()); };
  head.method = text(message_in.method_string());
  head.target = text(message_in.target());
  head.version = static_cast<int>(message_in.version());
  head.keep_alive = message_in.keep_alive();
  for (const auto& field : message_in) {
    head.headers.emplace_back(text(field.name_string()), text(field.value()));
  }
  head.expects_continue = boost::beast::iequals(message_in[http::field::expect], "100-continue");
  HttpRequest::split_target(head);
}

void HttpParser::Impl::fail(boost::system::error_code error) {
  state = State::kFailed;
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    status = 431;
    message = "the header is larger than " + std::to_string(limits.header_bytes) + " bytes";
  } else if (error == http::error::body_limit) {
    status = 413;
    message = "the body is larger than " + std::to_string(limits.body_bytes) + " bytes";
  } else if (error == http::error::bad_version) {
    status = 505;
    message = "expected HTTP/1.0 or HTTP/1.1";
  } else {
    status = 400;
    message = "no valid HTTP request: " + error.message();
  }
}

HttpParser::HttpParser(const HttpLimits& limits) : impl_(std::make_unique<Impl>(limits)) {}
HttpParser::~HttpParser() = default;
HttpParser::HttpParser(HttpParser&&) noexcept = default;
HttpParser& HttpParser::operator=(HttpParser&&) noexcept = default;

size_t HttpParser::feed(std::string_view bytes) {
  if (impl_->state == State::kDone || impl_->state == State::kFailed) return 0;
  const bool in_header = impl_->state == State::kHeader;
  // Five bytes, "0\r\n\r\n", are the least that ends a body in chunks; with fewer Beast's parser asserts when
  // it has seen the last chunk before.
  constexpr size_t kLastChunk = 5;
  if (!in_header && impl_->parser.chunked() && bytes.size() < kLastChunk) return 0;
  impl_->parser.eager(!in_header);
  boost::system::error_code error;
  const size_t taken = impl_->parser.put(boost::asio::buffer(bytes.data(), bytes.size()), error);
  if (error && error != http::error::need_more) {
    impl_->fail(error);
    return taken;
  }
  if (in_header && impl_->parser.is_header_done()) {
    impl_->read_header();
    impl_->state = State::kBody;
    // A body announced as too long is refused before it is sent.
    const auto length = impl_->parser.content_length();
    if (length && *length > impl_->limits.body_bytes) impl_->fail(http::error::body_limit);
  } else if (in_header && bytes.size() > impl_->limits.header_bytes) {
    impl_->fail(http::error::header_limit);
  }
  if (impl_->state != State::kFailed && impl_->parser.is_done()) impl_->state = State::kDone;
  return taken;
}

HttpParser::State HttpParser::state() const { return impl_->state; }
const HttpRequest& HttpParser::head() const { return impl_->head; }
int HttpParser::error_status() const { return impl_->status; }
const std::string& HttpParser::error_message() const { return impl_->message; }

HttpRequest HttpParser::take() {
  HttpRequest request = std::move(impl_->head);
  request.body = std::move(impl_->parser.get().body());
  return request;
}

}  // namespace millrace::server
