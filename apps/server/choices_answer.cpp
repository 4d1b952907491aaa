#include "choices_answer.h"

#include <utility>

#include "api_error.h"
#include "ids.h"

namespace millrace::server {
namespace {

// The members that every event and the whole answer begin with, without the braces around them.
std::string common_members(const std::string& id, std::string_view object, const std::string& model) {
  std::string out;
  JsonWriter json(out);
  json.field("id", id).field("object", object);
  json.field("created", static_cast<int64_t>(unix_time())).field("model", model);
  return out;
}

}  // namespace

ChoicesAnswer::ChoicesAnswer(Api& api, ModelLease model, const std::vector<Request>& requests,
                             StreamOptions stream, Headers headers, Timeline::Entry entry,
                             std::string_view object)
    : stream_(stream),
      logprobs_(requests.front().sampling.logprobs.has_value()),
      generation_(std::move(model), api.timeline(), requests, entry),
      headers_(std::move(headers)),
      common_(common_members(entry.id, object, generation_.model().id())) {}

bool ChoicesAnswer::advance(std::string& out, size_t max_bytes) {
  while (out.size() < max_bytes) {
    const std::optional<Generation::Item> item = generation_.next();
    if (!item) break;
    take(*item, out);
  }
  if (!generation_.done()) return false;
  if (stream_.stream && !ended_) {
    ended_ = true;
    if (generation_.failure()) {
      out += "data: " + error_body(*generation_.failure()) + "\n\n";
    } else if (stream_.include_usage) {
      out += "data: ";
      JsonWriter json(out);
      json.begin_object().raw(common_).key("choices").begin_array().end_array();
      write_usage(json);
      json.end_object();
      out += "\n\n";
    }
    out += "data: [DONE]\n\n";
  }
  return true;
}

std::optional<HttpResponse> ChoicesAnswer::response() {
  if (generation_.failure() && !sent_) return error_response(*generation_.failure());
  if (stream_.stream || !generation_.done()) return std::nullopt;
  std::string body;
  JsonWriter json(body);
  json.begin_object().raw(common_).key("choices").begin_array();
  for (size_t i = 0; i < generation_.choices(); ++i) write_choice(json, i);
  json.end_array();
  write_usage(json);
  json.end_object();
  return HttpResponse{.body = std::move(body), .headers = headers_};
}

void ChoicesAnswer::write_usage(JsonWriter& json) const {
  const Generation::Totals& t = generation_.totals();
  json.key("usage").begin_object();
  json.field("prompt_tokens", t.prompt).field("completion_tokens", given_tokens());
  json.field("total_tokens", t.prompt + given_tokens());
  json.key("prompt_tokens_details").begin_object().field("cached_tokens", t.cached).end_object();
  write_usage_details(json);
  json.end_object();
}

}  // namespace millrace::server
