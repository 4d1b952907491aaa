// The small endpoints: models, tokens, templates, health.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "api_error.h"
#include "base/utf8.h"
#include "conversation.h"
#include "endpoints.h"

namespace millrace::server {
namespace {

Reply json_reply(const Json& value, int status = 200) {
  return {.response = {.status = status, .body = value.dump(-1, ' ', false, Json::error_handler_t::replace)}};
}

Json model_json(const Api& api, const std::string& id) {
  const ModelInfo& info = api.engine_info();
  return {{"id", id},
          {"object", "model"},
          {"created", api.created()},
          {"owned_by", "millrace"},
          {"max_model_len", info.context},
          {"meta",
           {{"architecture", info.architecture},
            {"vocab", info.vocab},
            {"trained_context", info.trained_context},
            {"device", info.device}}}};
}

std::vector<int32_t> token_list(const Fields& fields, std::string_view key, int32_t vocab) {
  const Json* list = fields.array(key);
  if (list == nullptr) bad_field(fields.path_of(key), "is missing, expected an array", "missing_field");
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& value = (*list)[i];
    const std::string path = element_path(fields.path_of(key), i);
    if (!value.is_number_integer()) wrong_type(path, value, "a token id");
    const bool good = value.is_number_unsigned() && value.get<uint64_t>() < static_cast<uint64_t>(vocab);
    if (!good) bad_field(path, fmt::format("found {}, expected 0 to {}", value.dump(), vocab - 1));
    tokens.push_back(value.get<int32_t>());
  }
  return tokens;
}

}  // namespace

Reply list_models(Api& api) {
  Json list = Json::array({model_json(api, api.model_id())});
  for (const std::string& alias : api.options().aliases) list.push_back(model_json(api, alias));
  return json_reply({{"object", "list"}, {"data", list}});
}

Reply get_model(Api& api, const std::string& id) {
  const auto& aliases = api.options().aliases;
  if (id != api.model_id() && std::find(aliases.begin(), aliases.end(), id) == aliases.end()) {
    throw ApiError(
        404,
        fmt::format("the model '{}' does not exist; this server has '{}'", id.substr(0, 200), api.model_id()),
        "model", "model_not_found");
  }
  return json_reply(model_json(api, id));
}

// {"content" or "prompt" or "text", "add_special", "parse_special"} or {"messages", ...} -> {"tokens",
// "count"}
Reply tokenize(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  std::vector<int32_t> tokens;
  if (fields.has("messages")) {
    tokens = api.format().prompt(read_conversation(fields));
  } else {
    std::optional<std::string> text = fields.text("content");
    if (!text) text = fields.text("prompt");
    if (!text) text = fields.text("text");
    if (!text) bad_field("content", "is missing, expected a string", "missing_field");
    tokens = api.engine().tokenize(*text, fields.boolean("add_special").value_or(true),
                                   fields.boolean("parse_special").value_or(true));
  }
  return json_reply(
      {{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", api.engine_info().context}});
}

Reply detokenize(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const std::vector<int32_t> tokens = token_list(fields, "tokens", api.engine_info().vocab);
  const std::string text =
      valid_utf8(api.engine().detokenize(tokens, fields.boolean("show_special").value_or(true)));
  return json_reply({{"content", text}, {"prompt", text}});
}

Reply apply_template(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const std::vector<int32_t> tokens = api.format().prompt(read_conversation(Fields(body)));
  return json_reply({{"prompt", valid_utf8(api.engine().detokenize(tokens, true))}, {"tokens", tokens}});
}

namespace {

struct Hindrance {
  std::string status, reason;
};

// What only a new process would mend, what means that this one takes no more requests, and what will pass.
std::optional<Hindrance> failed(Api& api) {
  const std::string failure = api.failure();
  return failure.empty() ? std::nullopt : std::optional(Hindrance{"failed", valid_utf8(failure)});
}
std::optional<Hindrance> leaving(Api& api) {
  if (auto why = failed(api)) return why;
  return api.draining() ? std::optional(Hindrance{"draining", "the server is shutting down"}) : std::nullopt;
}
std::optional<Hindrance> hindered(Api& api) {
  if (auto why = leaving(api)) return why;
  return api.overloaded() ? std::optional(Hindrance{"overloaded", "too many large requests wait to be read"})
                          : std::nullopt;
}

Reply state_reply(const std::optional<Hindrance>& why, const Json& good) {
  return why ? json_reply({{"status", why->status}, {"reason", why->reason}}, 503) : json_reply(good);
}

}  // namespace

Reply live(Api& api) { return state_reply(failed(api), {{"status", "ok"}}); }
Reply ready(Api& api) { return state_reply(leaving(api), {{"status", "ready"}, {"model", api.model_id()}}); }
Reply health(Api& api) { return state_reply(hindered(api), {{"status", "ok"}}); }

}  // namespace millrace::server
