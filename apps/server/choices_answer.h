// The answer of an endpoint that gives choices: chat and text completions. They differ in what a choice looks
// like.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api.h"
#include "generation.h"
#include "http.h"
#include "request_fields.h"

namespace millrace::server {

class ChoicesAnswer : public Answer {
 public:
  // `object`: what the API calls such an answer.
  ChoicesAnswer(Api& api, const std::vector<Request>& requests, StreamOptions stream, Headers headers,
                Timeline::Entry entry, std::string_view object);

  bool streaming() const override { return stream_.stream; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  Headers headers() const override { return headers_; }
  int64_t generated_tokens() const override { return generation_.totals().generated; }
  bool advance(std::string& out, size_t most) override;
  std::optional<HttpResponse> response() override;

 protected:
  // Takes an event in, and appends what a stream shows of it.
  virtual void take(const Generation::Item& item, std::string& out) = 0;
  virtual std::string whole_choice(size_t index) = 0;       // as a JSON object
  virtual std::string usage_details() const { return {}; }  // more fields of usage, each behind a comma
  // An event with this one choice, a JSON object.
  void send(std::string& out, std::string_view choice);

  const StreamOptions stream_;
  const bool logprobs_;
  Generation generation_;

 private:
  std::string usage() const;

  const Headers headers_;
  const std::string common_;  // fields of every event
  bool sent_ = false, ended_ = false;
};

}  // namespace millrace::server
