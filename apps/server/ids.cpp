#include "ids.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/error.h"

namespace millrace::server {

// From the system's generator: an id that lets its holder read a stored answer must not follow from others.
std::string new_id(std::string_view prefix, int digits) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string id(prefix);
  std::array<unsigned char, 16> random{};
  for (size_t i = 0; i < static_cast<size_t>(digits); ++i) {
    const size_t byte = i / 2 % random.size();
    if (i % (2 * random.size()) == 0 && ::getentropy(random.data(), random.size()) != 0) {
      throw_error(ErrorCode::kInternal, "the system gives no random numbers");
    }
    id.push_back(kHex[i % 2 == 0 ? random[byte] >> 4 : random[byte] & 15]);
  }
  return id;
}

namespace {

bool good_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-' ||
           c == '_' || c == '.' || c == ':';
  });
}

// W3C: 00-<32 hex>-<16 hex>-<2 hex>; later versions may have more behind.
bool good_traceparent(std::string_view trace) {
  if (trace.size() < 55 || trace.size() > 128) return false;
  for (size_t i = 0; i < trace.size(); ++i) {
    const char c = trace[i];
    const bool dash = i == 2 || i == 35 || i == 52 || i == 55;
    const bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
    if (dash ? c != '-' : !(hex || (i > 55 && (c == '-' || (c >= 'a' && c <= 'z'))))) return false;
  }
  return true;
}

}  // namespace

Client describe_client(const HttpRequest& head, std::string remote) {
  Client client;
  const std::string_view id = head.header("x-request-id");
  client.request_id = good_request_id(id) ? std::string(id) : new_id("req-", 24);
  const std::string_view trace = head.header("traceparent");
  if (good_traceparent(trace)) client.traceparent = trace;
  client.remote = std::move(remote);
  return client;
}

}  // namespace millrace::server
