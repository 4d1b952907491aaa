// A request and a response as plain data, between the sockets (connection.cpp) and what answers (api.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace millrace::server {

bool same_word(std::string_view a, std::string_view b);  // in any case, as ASCII has it

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method, target;  // as sent
  std::string path, query;     // of the target, the path percent-decoded
  Headers headers;
  std::string body;
  int version = 11;  // 10 or 11
  bool keep_alive = true;
  bool expects_continue = false;
  bool has_body = false;  // one is announced

  std::string_view header(std::string_view name) const;  // empty when absent; names in any case
  std::string query_value(std::string_view name) const;  // percent-decoded; empty when absent
  static void split_target(HttpRequest& request);        // target -> path, query
};

struct ApiError;  // api_error.h

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body = {};
  Headers headers = {};
  // What the body says, where it is an error: other APIs say it in other words (anthropic_error.h).
  std::shared_ptr<const ApiError> error = {};
};

// How much one client may ask for; 0: any number.
struct ClientLimits {
  double requests_per_minute = 0;  // each prompt of a request is one
  double tokens_per_minute = 0;    // of prompts and answers
  int32_t running = 0;             // requests at the same time, each prompt is one
  int32_t max_priority = 0;        // 0 is a priority as well
};
class ClientUse;  // client_limits.h

// Who asks, as far as the connection and Api::admit know.
struct Client {
  std::string request_id = {};   // of this request: theirs or ours
  std::string traceparent = {};  // empty: none given
  std::string remote = {};       // address
  std::string key_name = {};     // empty: no keys in use
  ClientLimits limits = {};
  std::shared_ptr<ClientUse> use = {};  // what it has under way counts for as long as this is held
  Headers headers = {};                 // for each response: what is left of its limits
  double load_s = 0;                    // that it has waited for its model
};

// An answer that takes time. Whoever holds it calls on_ready once, then advance every time it was told to,
// from one thread at a time. Destroying it cancels what still runs.
class Answer {
 public:
  Answer() = default;
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;
  virtual ~Answer() = default;

  virtual bool streaming() const = 0;  // piece by piece; else response() once it is done
  // It is not known yet whether this will be an error: the head of a stream can wait for that for a while.
  virtual bool undecided() const { return false; }
  // Of a stream, and what is sent when nothing else was for some seconds.
  virtual std::string_view content_type() const { return "text/event-stream; charset=utf-8"; }
  virtual std::string_view keep_alive() const { return ": still here\n\n"; }
  // `notify` is called from any thread when there may be something to take. It must return soon.
  virtual void on_ready(std::function<void()> notify) = 0;
  // Takes what has come. Appends events to `out` and stops early when it holds `max_bytes` bytes or more.
  // True: that was all.
  virtual bool advance(std::string& out, size_t max_bytes) = 0;
  // Set when it failed before anything was sent, or when it is done and not streaming.
  virtual std::optional<HttpResponse> response() = 0;
  virtual Headers headers() const { return {}; }  // beside the usual ones
  // For the log's line about it.
  virtual int64_t generated_tokens() const { return 0; }
};

struct Reply {
  HttpResponse response = {};
  std::unique_ptr<Answer> answer = {};  // instead of the response
  bool unfinished = false;              // neither: the slice of time for it was used up (work_lanes.h)
};

}  // namespace millrace::server
