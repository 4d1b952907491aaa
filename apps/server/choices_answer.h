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
#include "base/json_writer.h"
#include "generation.h"
#include "http.h"
#include "request_fields.h"

namespace millrace::server {

class ChoicesAnswer : public Answer {
 public:
  // `object`: what the API calls such an answer.
  ChoicesAnswer(Api& api, ModelLease model, const std::vector<Request>& requests, StreamOptions stream,
                Headers headers, Timeline::Entry entry, std::string_view object);

  bool streaming() const override { return stream_.stream; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  Headers headers() const override { return headers_; }
  int64_t generated_tokens() const override { return generation_.totals().generated; }
  bool advance(std::string& out, size_t max_bytes) override;
  std::optional<HttpResponse> response() override;

 protected:
  // Takes an event in, and appends what an event stream shows of it.
  virtual void take(const Generation::Item& item, std::string& out) = 0;
  virtual void write_choice(JsonWriter& json, size_t index) = 0;   // an object: all of the choice
  virtual void write_usage_details(JsonWriter& /*json*/) const {}  // more fields of usage
  virtual int64_t given_tokens() const { return generation_.totals().generated; }
  // An event with one choice: the object that `write_one` writes.
  template <typename WriteOne>
  void send(std::string& out, WriteOne write_one) {
    sent_ = true;
    out += "data: ";
    JsonWriter json(out);
    json.begin_object().raw(common_).key("choices").begin_array();
    write_one(json);
    json.end_array();
    if (stream_.include_usage) json.field("usage", nullptr);
    json.end_object();
    out += "\n\n";
  }

  ServedModel& model() const { return generation_.model(); }

  const StreamOptions stream_;
  const bool logprobs_;
  Generation generation_;

 private:
  void write_usage(JsonWriter& json) const;

  const Headers headers_;
  const std::string common_;  // members of every event
  bool sent_ = false, ended_ = false;
};

}  // namespace millrace::server
