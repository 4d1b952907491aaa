// /v1/responses: create, count, retrieve (whole or as events), list the input of, cancel and delete.
#include <fmt/core.h>

#include <charconv>

#include "api_error.h"
#include "base/json_writer.h"
#include "conversation.h"
#include "conversations.h"
#include "endpoints.h"
#include "ids.h"
#include "image_tokens.h"
#include "item_page.h"
#include "prompt_bounds.h"
#include "request_fields.h"
#include "response_answer.h"
#include "response_input.h"
#include "response_replay.h"
#include "truncation.h"

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

// The number of the first event that is wanted.
size_t first_event(const HttpRequest& request) {
  const std::string text = request.query_value("starting_after");
  if (text.empty()) return 0;
  size_t after = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), after);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw ApiError(400,
                   fmt::format("'starting_after': found \"{}\", expected the sequence_number of an event",
                               text.substr(0, 60)),
                   "starting_after", "invalid_value");
  }
  return after + 1;
}

// With truncation, what a look at its size tells of.
void leave_out(ServedModel& model, ResponseInput& input, int32_t max_tokens) {
  if (!input.truncate) return;
  if (!read_images(input.conversation, model.info()).empty())
    bad_field("truncation", "found \"auto\" with images, expected \"disabled\"", "unsupported_value");
  const auto least = [&](const chat::Message& message) { return least_tokens(model.engine(), message); };
  leave_out_by_bound(input.conversation, least, model.info().context, max_tokens);
}

// The prompt; with truncation, of as much of the conversation as leaves room for an answer.
std::vector<int32_t> response_prompt(const ServedModel& model, ResponseInput& input, int32_t max_tokens,
                                     size_t most) {
  read_images(input.conversation, model.info());
  std::vector<int32_t> tokens =
      blaming("input", [&] { return model.format().prompt(input.conversation, most); });
  if (input.truncate) {
    truncate_to_fit(model.format(), input.conversation, tokens, model.info().context, max_tokens);
  }
  return tokens;
}

// What the text is held to, and the same said again in the response.
Constraints::Grammar read_text_format(const Fields& fields, ServedModel& model, ResponseInput& input) {
  Json echo = {{"format", {{"type", "text"}}}, {"verbosity", "medium"}};
  Constraints::Grammar content;
  if (const std::optional<Fields> text = fields.object("text")) {
    if (const std::optional<Fields> format = text->object("format")) {
      content = model.constraints().of_format(*format, &input.conversation);
      echo["format"] = format->json();
    }
  }
  input.echo["text"] = std::move(echo);
  return content;
}

}  // namespace

Reply create_response(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = api.writer_of(fields);
  Request request = read_request(fields, api, *model, client);
  for (const std::string_view key : {"n", "stop"}) {
    if (fields.has(key)) bad_field(std::string(key), "is not part of this endpoint", "unsupported_parameter");
  }
  request.max_tokens = static_cast<int32_t>(fields.integer("max_output_tokens", 1, 1 << 28).value_or(0));
  ResponseInput input = read_response_input(fields, api, client);
  input.conversation.objects = model->constraints().objects(fields);
  leave_out(*model, input, request.max_tokens);
  check_conversation_may_fit(model->engine(), input.conversation, "input");
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (input.logprobs) request.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
  Constraints::Grammar content = read_text_format(fields, *model, input);
  request.tokens = response_prompt(*model, input, request.max_tokens, most_counted(model->info().context));
  request.images = chat::images_of(input.conversation);
  check_context(request.tokens.size(), model->info(), "input");
  if (!request.ignore_end) request.stop_tokens = model->format().stop_tokens();
  request.constraint =
      blaming("tools", [&] { return model->format().constraint(input.conversation, std::move(content)); });

  Timeline::Entry entry = entry_of(new_id("resp_", 32), "responses", client, input.stream);
  const bool background = input.background, stream = input.stream;
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
  Reply reply;
  if (stream) {
    reply.answer = std::make_unique<ResponseLogAnswer>(shared->events(), 0, shared->headers());
  } else {
    reply.response = {.body = shared->running_body(), .headers = shared->headers()};
  }
  api.run_detached(shared);
  return reply;
}

// What create_response would compute for the same body, in tokens.
Reply count_input_tokens(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = api.writer_of(fields);
  ResponseInput input = read_response_input(fields, api, client);
  read_text_format(fields, *model, input);
  leave_out(*model, input, 0);
  const Engine& engine = model->engine();
  check_conversation_countable(engine, input.conversation, "input");
  const std::vector<int32_t> tokens = response_prompt(*model, input, 0, most_listed(engine));
  check_countable(engine, tokens.size(), "input");
  std::string out;
  JsonWriter(out)
      .begin_object()
      .field("object", "response.input_tokens")
      .field("input_tokens", tokens.size() + image_tokens(input.conversation, model->engine()))
      .end_object();
  return {.response = {.body = std::move(out)}};
}

Reply get_response(Api& api, const std::string& id, const HttpRequest& request, const Client& client) {
  StoredResponse found = stored(api, id, client);
  if (request.query_value("stream") != "true") return {.response = {.body = std::move(found.body)}};
  const size_t first = first_event(request);
  Reply reply;
  reply.answer = std::make_unique<ResponseLogAnswer>(
      found.events ? found.events : replay_response(Json::parse(found.body)), first);
  return reply;
}

Reply get_input_items(Api& api, const std::string& id, const HttpRequest& request, const Client& client) {
  const std::vector<StoredConversation::Item> items = stored_items(stored(api, id, client).input_items);
  std::vector<ListedItem> listed;
  for (const StoredConversation::Item& item : items) listed.push_back({.id = item.id, .json = item.json});
  return {.response = {.body = item_page(std::move(listed), request)}};
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
