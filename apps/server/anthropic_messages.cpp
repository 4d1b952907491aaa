// POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, which coding agents speak.
#include <fmt/core.h>

#include "anthropic_answer.h"
#include "anthropic_input.h"
#include "api_error.h"
#include "base/json_writer.h"
#include "conversation.h"
#include "endpoints.h"
#include "ids.h"
#include "image_tokens.h"
#include "prompt_bounds.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

// Clients of this API have names of their own for models: the error says how such a name is served.
ModelLease named_model(const Fields& fields, Api& api) {
  const std::string name = fields.required_text("model");
  try {
    return api.writer_of(fields);
  } catch (ApiError& error) {
    if (error.code == "model_not_found") {
      error.message += fmt::format("; millrace serve --alias {} answers to that name", name.substr(0, 200));
    }
    throw;
  }
}

}  // namespace

Reply create_message(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = named_model(fields, api);
  AnthropicAnswer::Options options{.model = fields.required_text("model")};
  options.stream = fields.boolean("stream").value_or(false);
  options.stop = read_stop(fields, "stop_sequences");
  const auto max_tokens = fields.integer("max_tokens", 1, 1 << 28);
  if (!max_tokens) bad_field("max_tokens", "is missing, expected an integer", "missing_required_parameter");
  Request request = read_request(fields, api, *model, client);
  request.stop.clear();
  request.samples = 1;
  request.max_tokens = static_cast<int32_t>(*max_tokens);
  check_messages_may_fit(model->engine(), fields.find("messages"), "messages");
  MessagesInput input = read_messages_input(fields, model->constraints(), *max_tokens);
  check_conversation_may_fit(model->engine(), input.conversation, "messages");
  request.images = read_images(input.conversation, model->info());
  request.tokens = model->format().prompt(input.conversation, most_counted(model->info().context));
  check_context(request.tokens.size(), model->info(), "messages");
  if (!request.ignore_end) request.stop_tokens = model->format().stop_tokens();
  request.constraint = model->format().constraint(input.conversation, input.content);

  Timeline::Entry entry = entry_of(new_id("msg_", 24), "messages", client, options.stream);
  options.headers = warn_ignored(
      fields, {"metadata", "service_tier", "container", "mcp_servers", "context_management"}, api, client);
  Reply reply;
  reply.answer =
      std::make_unique<AnthropicAnswer>(api, model, input, request, std::move(options), std::move(entry));
  return reply;
}

Reply count_message_tokens(Api& api, const HttpRequest& http, const Client& /*client*/) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = named_model(fields, api);
  const Engine& engine = model->engine();
  if (const Json* messages = fields.find("messages"); messages != nullptr && messages->is_array())
    check_countable(engine, messages->size(), "messages");
  const MessagesInput input = read_messages_input(fields, model->constraints(), 0);
  const size_t images = image_tokens(input.conversation, model->engine());
  check_conversation_countable(engine, input.conversation, "messages");
  const size_t tokens = model->format().prompt(input.conversation, most_listed(engine)).size() + images;
  check_countable(engine, tokens, "messages");
  std::string out;
  JsonWriter(out).begin_object().field("input_tokens", tokens).end_object();
  return {.response = {.body = std::move(out)}};
}

}  // namespace millrace::server
