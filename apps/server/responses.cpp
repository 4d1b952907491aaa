// /v1/responses: create, retrieve, list the input of, cancel and delete.
#include <fmt/format.h>

#include "api_error.h"
#include "base/json_writer.h"
#include "endpoints.h"
#include "ids.h"
#include "request_fields.h"
#include "response_answer.h"
#include "response_input.h"

namespace millrace::server {
namespace {

StoredResponse stored(Api& api, const std::string& id, const Client& client) {
  std::optional<StoredResponse> found = api.store().find(id, client.key_name);
  if (!found) {
    throw ApiError(404, fmt::format("the response '{}' is not stored here", id.substr(0, 100)), "response_id",
                   "response_not_found");
  }
  return *std::move(found);
}

void refuse_stream(const HttpRequest& request) {
  if (request.query_value("stream") == "true") {
    throw ApiError(400, "'stream': a stored response cannot be streamed, expected false", "stream",
                   "unsupported");
  }
}

}  // namespace

Reply create_response(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  Request request = read_request(fields, api, *model, client);
  for (const std::string_view key : {"n", "stop"}) {
    if (fields.has(key)) fields.refuse(key, "is not part of this endpoint");
  }
  request.max_tokens = static_cast<int32_t>(fields.integer("max_output_tokens", 1, 1 << 28).value_or(0));
  ResponseInput input = read_response_input(fields, api, client);
  input.conversation.objects = model->constraints().objects(fields);
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (input.logprobs) request.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
  Json text_echo = {{"format", {{"type", "text"}}}, {"verbosity", "medium"}};
  Constraints::Grammar content;
  if (const std::optional<Fields> text = fields.object("text")) {
    if (const std::optional<Fields> format = text->object("format")) {
      content = model->constraints().of_format(*format, &input.conversation);
      text_echo["format"] = format->json();
    }
  }
  input.echo["text"] = std::move(text_echo);
  request.tokens = model->format().prompt(input.conversation);
  if (!request.ignore_end) request.stop_tokens = model->format().stop_tokens();
  request.constraint = model->format().constraint(input.conversation, std::move(content));

  Timeline::Entry entry;
  entry.id = new_id("resp_", 32);
  entry.request_id = client.request_id;
  entry.endpoint = "responses";
  entry.stream = input.stream;
  const bool background = input.background;
  Headers headers = warn_ignored(
      fields, {"service_tier", "user", "prompt_cache_key", "safety_identifier", "max_tool_calls", "prompt"},
      api, client);
  auto answer = std::make_unique<ResponseAnswer>(api, model, std::move(input), request, client.key_name,
                                                 std::move(headers), std::move(entry));
  if (!background) return {.response = {}, .answer = std::move(answer)};
  const std::shared_ptr<ResponseAnswer> shared = std::move(answer);
  shared->store([weak = std::weak_ptr(shared)] {
    if (const auto running = weak.lock()) running->cancel();
  });
  HttpResponse response{.body = shared->running_body(), .headers = shared->headers()};
  api.run_detached(shared);
  return {.response = std::move(response)};
}

Reply get_response(Api& api, const std::string& id, const HttpRequest& request, const Client& client) {
  refuse_stream(request);
  return {.response = {.body = stored(api, id, client).body}};
}

Reply get_input_items(Api& api, const std::string& id, const HttpRequest& /*request*/, const Client& client) {
  const StoredResponse found = stored(api, id, client);
  const Json& items = found.input_items;
  const Json list = {{"object", "list"},
                     {"data", items},
                     {"first_id", items.front()["id"]},
                     {"last_id", items.back()["id"]},
                     {"has_more", false}};
  return {.response = {.body = list.dump(-1, ' ', false, Json::error_handler_t::replace)}};
}

Reply cancel_response(Api& api, const std::string& id, const Client& client) {
  const StoredResponse found = stored(api, id, client);
  if (!found.cancel) {
    throw ApiError(400, "only a response that was created with background and is under way can be cancelled",
                   "response_id", "not_cancellable");
  }
  found.cancel();
  Json body = Json::parse(found.body);
  body["status"] = "cancelled";
  return {.response = {.body = body.dump()}};
}

Reply delete_response(Api& api, const std::string& id, const Client& client) {
  const StoredResponse found = stored(api, id, client);
  if (found.cancel) found.cancel();
  api.store().erase(id, client.key_name);
  std::string body;
  JsonWriter(body)
      .begin_object()
      .field("id", id)
      .field("object", "response")
      .field("deleted", true)
      .end_object();
  return {.response = {.body = std::move(body)}};
}

}  // namespace millrace::server
