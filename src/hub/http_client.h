// Requests over HTTP, several at a time, on the caller's thread. curl/ has them by libcurl; no_curl/ stands
// in where it is not installed. Redirects are not followed here: who asks decides what the next host may see.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace millrace::hub {

// Why this build cannot fetch anything; empty when it can.
std::string why_no_network();

struct HttpAnswer {
  int status = 0;                              // 0: none came
  std::map<std::string, std::string> headers;  // names in small letters
  std::string error;                           // why it did not end as it should; empty: it did
  bool unreachable = false;                    // the host was not found or does not answer at all

  std::string header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::string() : found->second;
  }
};

struct HttpQuery {
  std::string url;
  bool head = false;                 // no body is wanted
  std::vector<std::string> headers;  // "Range: bytes=0-1"
  // Called with the headers when the first byte of the body comes, and with every piece of it; false: stop
  // there. Must not throw.
  std::function<bool(const HttpAnswer& answer, std::span<const std::byte> piece)> on_body = {};
};

class HttpClient {
 public:
  virtual ~HttpClient() = default;
  virtual int begin(HttpQuery query) = 0;  // returns its number
  virtual void stop(int number) = 0;       // it will not be among the finished ones
  struct Finished {
    int number;
    HttpAnswer answer;
  };
  // Waits until something is finished, at most so long.
  virtual std::vector<Finished> wait(int wait_ms) = 0;
};

// Throws Error{kUnsupported} where why_no_network() says why.
std::unique_ptr<HttpClient> make_http_client();

}  // namespace millrace::hub
