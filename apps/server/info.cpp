// The small endpoints: tokens, templates, health.
#include <fmt/format.h>

#include "api_error.h"
#include "base/utf8.h"
#include "conversation.h"
#include "endpoints.h"
#include "json_reply.h"

namespace millrace::server {
namespace {

std::vector<int32_t> token_list(const Fields& fields, std::string_view key, int32_t vocab) {
  const Json* list = fields.array(key);
  if (list == nullptr)
    bad_field(fields.path_of(key), "is missing, expected an array", "missing_required_parameter");
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

namespace {

constexpr size_t kMaxTokens = size_t{1} << 20;  // of an answer that lists them

void check_number(size_t tokens) {
  if (tokens > kMaxTokens) {
    bad_field("content", fmt::format("is more than {} tokens: send it in parts", kMaxTokens));
  }
}

}  // namespace

// {"content" or "prompt" or "text", "add_special", "parse_special"} or {"messages", ...} -> {"tokens",
// "count"}
Reply tokenize(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  std::vector<int32_t> tokens;
  if (fields.has("messages")) {
    tokens = model->format().prompt(read_conversation(fields));
  } else {
    std::optional<std::string> text = fields.text("content");
    if (!text) text = fields.text("prompt");
    if (!text) text = fields.text("text");
    if (!text) bad_field("content", "is missing, expected a string", "missing_required_parameter");
    // Twice: what cannot be few enough is not tokenized.
    check_number(model->engine().min_tokens(*text));
    tokens = model->engine().tokenize(*text, fields.boolean("add_special").value_or(true),
                                      fields.boolean("parse_special").value_or(true), kMaxTokens);
    check_number(tokens.size());
  }
  return json_reply({{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", model->info().context}});
}

Reply detokenize(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  const std::vector<int32_t> tokens = token_list(fields, "tokens", model->info().vocab);
  const std::string text =
      valid_utf8(model->engine().detokenize(tokens, fields.boolean("show_special").value_or(true)));
  return json_reply({{"content", text}, {"prompt", text}});
}

Reply apply_template(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  const std::vector<int32_t> tokens = model->format().prompt(read_conversation(fields));
  return json_reply({{"prompt", valid_utf8(model->engine().detokenize(tokens, true))}, {"tokens", tokens}});
}

Reply health(Api& api) {
  const std::string failure = api.failure();
  if (!failure.empty()) return json_reply({{"status", "failed"}, {"reason", valid_utf8(failure)}}, 503);
  return json_reply({{"status", "ok"}});
}

Reply ready(Api& api) {
  const std::string failure = api.failure();
  if (!failure.empty()) return json_reply({{"status", "failed"}, {"reason", valid_utf8(failure)}}, 503);
  if (api.draining()) return json_reply({{"status", "draining"}}, 503);
  Json loaded = Json::array();
  const std::vector<ModelSet::Status> models = api.models().list();
  for (const ModelSet::Status& model : models) {
    if (model.info) loaded.push_back(model.name);
  }
  return json_reply({{"status", "ready"}, {"model", models.front().name}, {"loaded", loaded}});
}

}  // namespace millrace::server
