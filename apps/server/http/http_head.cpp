#include "http/http_head.h"

#include <algorithm>
#include <charconv>
#include <vector>

namespace millrace::server {
namespace {

constexpr size_t kMaxFields = 256;
constexpr size_t kMaxMethod = 32;

HttpRefusal bad_request(std::string what) {
  return {.status = 400, .message = "no valid HTTP request: " + what};
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_alphanumeric(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

bool is_token(std::string_view text) {
  constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return is_alphanumeric(c) || kMarks.find(c) != std::string_view::npos;
  });
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// Words between commas, as they stand: empty ones as well.
std::vector<std::string_view> list_of(std::string_view text) {
  std::vector<std::string_view> words;
  while (true) {
    const size_t comma = text.find(',');
    words.push_back(trimmed(text.substr(0, comma)));
    if (comma == std::string_view::npos) return words;
    text.remove_prefix(comma + 1);
  }
}

std::vector<std::string_view> values_of(const HttpRequest& request, std::string_view name) {
  std::vector<std::string_view> values;
  for (const auto& [key, value] : request.headers) {
    if (same_word(key, name)) values.emplace_back(value);
  }
  return values;
}

// name, name:port, 1.2.3.4:port or [::1]:port
bool is_authority(std::string_view text) {
  if (text.empty() || text.size() > 300) return false;
  std::string_view port;
  if (text.front() == '[') {
    const size_t end = text.find(']');
    if (end == std::string_view::npos || end < 3) return false;
    const std::string_view inner = text.substr(1, end - 1);
    const bool good = std::all_of(inner.begin(), inner.end(),
                                  [](char c) { return is_alphanumeric(c) || c == ':' || c == '.'; });
    if (!good) return false;
    port = text.substr(end + 1);
  } else {
    const size_t colon = std::min(text.find(':'), text.size());
    const std::string_view name = text.substr(0, colon);
    const bool good = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return is_alphanumeric(c) || c == '.' || c == '-' || c == '_';
    });
    if (!good) return false;
    port = text.substr(colon);
  }
  if (port.empty()) return true;
  port.remove_prefix(1);
  return text[text.size() - port.size() - 1] == ':' && port.size() <= 5 &&
         std::all_of(port.begin(), port.end(), is_digit);
}

// The target becomes a path: what is asked of a proxy, or for a tunnel, is refused.
MaybeRefusal read_target(HttpRequest& request, std::string_view host) {
  std::string& target = request.target;
  if (target.front() == '/') return std::nullopt;
  if (target == "*") {
    if (request.method == "OPTIONS") return std::nullopt;
    return bad_request("the target * is for OPTIONS only");
  }
  const size_t scheme = target.find("://");
  const std::string_view name = std::string_view(target).substr(0, std::min(scheme, target.size()));
  if (scheme == std::string::npos || !(same_word(name, "http") || same_word(name, "https"))) {
    return bad_request("the target is no path: expected one that begins with /");
  }
  const size_t begin = scheme + 3;
  const size_t end = std::min(target.find_first_of("/?", begin), target.size());
  const std::string_view authority = std::string_view(target).substr(begin, end - begin);
  if (!is_authority(authority) || (!host.empty() && !same_word(authority, host))) {
    return bad_request("the target names another host than the field Host");
  }
  std::string path = target.substr(end);
  if (path.empty() || path.front() == '?') path.insert(0, "/");
  target = std::move(path);
  return std::nullopt;
}

MaybeRefusal read_length(std::string_view text, uint64_t& length) {
  const bool digits = !text.empty() && std::all_of(text.begin(), text.end(), is_digit);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (!digits || end != text.data() + text.size()) {
    return bad_request("Content-Length is no number");
  }
  if (error != std::errc()) return HttpRefusal{.status = 413, .message = "the body is too large"};
  return std::nullopt;
}

MaybeRefusal read_coding(const HttpRequest& request, const std::vector<std::string_view>& fields) {
  if (request.version < 11) return bad_request("Transfer-Encoding is not part of HTTP/1.0");
  if (!values_of(request, "content-length").empty()) {
    return bad_request("Content-Length and Transfer-Encoding exclude each other");
  }
  std::vector<std::string_view> codings;
  for (const std::string_view field : fields) {
    for (const std::string_view coding : list_of(field)) codings.push_back(coding);
  }
  if (codings.size() == 1 && same_word(codings.front(), "chunked")) return std::nullopt;
  for (const std::string_view coding : codings) {
    if (!is_token(coding)) return bad_request("Transfer-Encoding is malformed");
  }
  const bool known = std::all_of(codings.begin(), codings.end(), [](std::string_view coding) {
    return same_word(coding, "chunked") || same_word(coding, "identity");
  });
  if (known) return bad_request("Transfer-Encoding must be chunked, once and nothing else");
  return HttpRefusal{.status = 501, .message = "of all transfer codings only chunked is known here"};
}

MaybeRefusal read_body_end(HttpRequest& request, HttpFraming& framing) {
  const auto codings = values_of(request, "transfer-encoding");
  const auto lengths = values_of(request, "content-length");
  if (!codings.empty()) {
    framing.chunked = true;
    return read_coding(request, codings);
  }
  if (lengths.size() > 1) return bad_request("there is more than one Content-Length");
  return lengths.empty() ? std::nullopt : read_length(lengths.front(), framing.length);
}

MaybeRefusal read_expectation(HttpRequest& request) {
  if (request.version < 11) return std::nullopt;
  for (const std::string_view value : values_of(request, "expect")) {
    if (!same_word(value, "100-continue")) {
      return HttpRefusal{.status = 417, .message = "the only expectation that can be met is 100-continue"};
    }
    request.expects_continue = true;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string_view> LineScanner::next(std::string_view bytes) {
  for (; looked_ < bytes.size() && !refusal_; ++looked_) {
    const char c = bytes[looked_];
    const bool after_cr = looked_ > 0 && bytes[looked_ - 1] == '\r';
    if (c == '\n' && after_cr) {
      const size_t length = looked_ - 1;
      looked_ = 0;
      return bytes.substr(0, length);
    }
    if (after_cr || c == '\n') {
      refusal_ = bad_request("a line must end with CR and LF");
    } else if ((static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\r') || c == 0x7f) {
      refusal_ = bad_request("there is a control character in the head");
    }
  }
  return std::nullopt;
}

MaybeRefusal read_request_line(std::string_view line, HttpRequest& request) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) {
    return bad_request("expected METHOD TARGET HTTP/1.1");
  }
  const std::string_view method = line.substr(0, first), version = line.substr(last + 1);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  if (!is_token(method) || method.size() > kMaxMethod) return bad_request("the method is malformed");
  const bool visible =
      std::all_of(target.begin(), target.end(), [](char c) { return c > 0x20 && c < 0x7f && c != '#'; });
  if (target.empty() || !visible) return bad_request("the target is malformed");
  const bool http = version.size() == 8 && version.starts_with("HTTP/") && is_digit(version[5]) &&
                    version[6] == '.' && is_digit(version[7]);
  if (!http) return bad_request("the version is malformed");
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    return HttpRefusal{.status = 505, .message = "expected HTTP/1.0 or HTTP/1.1"};
  }
  request.method = method;
  request.target = target;
  request.version = version.back() == '1' ? 11 : 10;
  return std::nullopt;
}

MaybeRefusal read_field(std::string_view line, Headers& headers) {
  if (line.front() == ' ' || line.front() == '\t') return bad_request("a field goes on in a second line");
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return bad_request("a field has no colon");
  const std::string_view name = line.substr(0, colon);
  if (!is_token(name)) return bad_request("the name of a field is malformed");
  // Some readers take an underscore for a hyphen.
  std::string hyphens(name);
  std::replace(hyphens.begin(), hyphens.end(), '_', '-');
  if (hyphens != name && is_framing_field(hyphens)) return bad_request("the name of a field is misleading");
  if (headers.size() >= kMaxFields) {
    return HttpRefusal{.status = 431,
                       .message = "the header has more than " + std::to_string(kMaxFields) + " fields"};
  }
  headers.emplace_back(std::string(name), std::string(trimmed(line.substr(colon + 1))));
  return std::nullopt;
}

MaybeRefusal read_framing(HttpRequest& request, HttpFraming& framing) {
  const auto hosts = values_of(request, "host");
  if (hosts.size() > 1) return bad_request("there is more than one Host");
  if (hosts.empty() && request.version >= 11) return bad_request("the field Host is missing");
  if (!hosts.empty() && !is_authority(hosts.front())) return bad_request("the field Host is malformed");
  if (auto refusal = read_target(request, hosts.empty() ? std::string_view() : hosts.front())) return refusal;
  if (auto refusal = read_body_end(request, framing)) return refusal;
  if (auto refusal = read_expectation(request)) return refusal;
  bool close = request.version < 11;
  for (const std::string_view value : values_of(request, "connection")) {
    for (const std::string_view word : list_of(value)) {
      if (same_word(word, "keep-alive") && request.version < 11) close = false;
    }
  }
  for (const std::string_view value : values_of(request, "connection")) {
    for (const std::string_view word : list_of(value)) close = close || same_word(word, "close");
  }
  request.keep_alive = !close;
  HttpRequest::split_target(request);
  return std::nullopt;
}

bool is_framing_field(std::string_view name) {
  return same_word(name, "content-length") || same_word(name, "transfer-encoding") || same_word(name, "host");
}

}  // namespace millrace::server
