#include "choices_answer.h"

#include <fmt/format.h>

#include <utility>

#include "api_error.h"
#include "ids.h"

namespace millrace::server {

ChoicesAnswer::ChoicesAnswer(Api& api, const std::vector<Request>& requests, StreamOptions stream,
                             Headers headers, Timeline::Entry entry, std::string_view object)
    : stream_(stream),
      logprobs_(requests.front().sampling.logprobs.has_value()),
      generation_(api.engine(), api.timeline(), requests, entry),
      headers_(std::move(headers)),
      common_(fmt::format(R"("id":"{}","object":"{}","created":{},"model":{})", entry.id, object,
                          static_cast<int64_t>(unix_time()), json_string(api.model_id()))) {}

bool ChoicesAnswer::advance(std::string& out, size_t most) {
  while (out.size() < most) {
    const std::optional<Generation::Item> item = generation_.next();
    if (!item) break;
    take(*item, out);
  }
  if (!generation_.done()) return false;
  if (stream_.stream && !ended_) {
    ended_ = true;
    if (generation_.failure()) {
      out += fmt::format("data: {{\"error\":{}}}\n\n", error_object(*generation_.failure()));
    } else if (stream_.include_usage) {
      out += fmt::format("data: {{{},\"choices\":[],\"usage\":{}}}\n\n", common_, usage());
    }
    out += "data: [DONE]\n\n";
  }
  return true;
}

std::optional<HttpResponse> ChoicesAnswer::response() {
  if (generation_.failure() && !sent_) return error_response(*generation_.failure());
  if (stream_.stream || !generation_.done()) return std::nullopt;
  std::string list;
  for (size_t i = 0; i < generation_.choices(); ++i) {
    if (i > 0) list.push_back(',');
    list += whole_choice(i);
  }
  return HttpResponse{.body = fmt::format("{{{},\"choices\":[{}],\"usage\":{}}}", common_, list, usage()),
                      .headers = headers_};
}

void ChoicesAnswer::send(std::string& out, std::string_view choice) {
  sent_ = true;
  out += fmt::format("data: {{{},\"choices\":[{}]{}}}\n\n", common_, choice,
                     stream_.include_usage ? ",\"usage\":null" : "");
}

std::string ChoicesAnswer::usage() const {
  const Generation::Totals& t = generation_.totals();
  return fmt::format(
      R"({{"prompt_tokens":{},"completion_tokens":{},"total_tokens":{},"prompt_tokens_details":{{"cached_tokens":{}}}{}}})",
      t.prompt, t.generated, t.prompt + t.generated, t.cached, usage_details());
}

}  // namespace millrace::server
