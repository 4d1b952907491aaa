// The small endpoints: tokens, templates, health.
#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "api_error.h"
#include "base/utf8.h"
#include "conversation.h"
#include "endpoints.h"
#include "image_tokens.h"
#include "json_reply.h"
#include "prompt_bounds.h"

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

// `more`: tokens that images take beside these.
std::vector<int32_t> conversation_tokens(const Fields& fields, const ServedModel& model, size_t& more) {
  check_messages_may_fit(model.engine(), fields.find("messages"), "messages");
  const chat::Conversation conversation = read_conversation(fields);
  check_conversation_may_fit(model.engine(), conversation, "messages");
  more = image_tokens(conversation, model.engine());
  std::vector<int32_t> tokens =
      blaming("messages", [&] { return model.format().prompt(conversation, most_listed(model.engine())); });
  check_countable(model.engine(), tokens.size(), "messages");
  return tokens;
}

}  // namespace

// {"content" or "prompt" or "text", "add_special", "parse_special"} or {"messages", ...} -> {"tokens",
// "count"}
Reply tokenize(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  std::vector<int32_t> tokens;
  size_t more = 0;
  if (fields.has("messages")) {
    tokens = conversation_tokens(fields, *model, more);
  } else {
    std::optional<std::string> text;
    std::string_view key;
    for (const std::string_view name : {"content", "prompt", "text"}) {
      if (!text && (text = fields.text(name))) key = name;
    }
    if (!text) bad_field("content", "is missing, expected a string", "missing_required_parameter");
    // Twice: what cannot be few enough is not tokenized.
    check_countable(model->engine(), model->engine().min_tokens(*text), key);
    tokens = model->engine().tokenize(*text, fields.boolean("add_special").value_or(true),
                                      fields.boolean("parse_special").value_or(true),
                                      most_listed(model->engine()));
    check_countable(model->engine(), tokens.size(), key);
  }
  return json_reply(
      {{"tokens", tokens}, {"count", tokens.size() + more}, {"max_model_len", model->info().context}});
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

// The conversation as the model would read it: refused like a chat where it cannot fit, before it is
// rendered.
Reply apply_template(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  size_t more = 0;
  const std::vector<int32_t> tokens = conversation_tokens(fields, *model, more);
  return json_reply({{"prompt", valid_utf8(model->engine().detokenize(tokens, true))}, {"tokens", tokens}});
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
// Ranks are lost, and are being started: what is asked meanwhile waits for them, unless another replica has
// its own.
std::optional<Hindrance> without_ranks(Api& api) {
  if (auto why = leaving(api)) return why;
  const std::vector<RankGroupStats> groups = api.models().stats().rank_groups;
  const bool up =
      std::any_of(groups.begin(), groups.end(), [](const RankGroupStats& group) { return group.up; });
  if (groups.empty() || up) return std::nullopt;
  // Which one, and where, is for those who have a key: /stats.
  return Hindrance{"starting ranks", "a rank was lost, and the group is formed anew"};
}
std::optional<Hindrance> hindered(Api& api) {
  if (auto why = without_ranks(api)) return why;
  return api.overloaded() ? std::optional(Hindrance{"overloaded", "too many large requests wait to be read"})
                          : std::nullopt;
}

Reply state_reply(const std::optional<Hindrance>& why, const Json& good) {
  return why ? json_reply({{"status", why->status}, {"reason", why->reason}}, 503) : json_reply(good);
}

}  // namespace

Reply live(Api& api) { return state_reply(failed(api), {{"status", "ok"}}); }

Reply health(Api& api) {
  Json good = {{"status", "ok"}};
  if (const std::string fallback = api.fallback(); !fallback.empty()) good["fallback"] = valid_utf8(fallback);
  const EngineStats stats = api.models().stats();
  if (!stats.rank_groups.empty()) {
    size_t up = 0, wanted = 0;
    uint64_t restarts = 0;
    for (const RankGroupStats& group : stats.rank_groups) {
      up += group.ranks.size();
      wanted += static_cast<size_t>(group.wanted);
      restarts += group.restarts;
    }
    good["ranks"] = {{"up", up}, {"wanted", wanted}, {"restarts", restarts}};
  }
  return state_reply(hindered(api), good);
}

Reply ready(Api& api) {
  Json loaded = Json::array();
  const std::vector<ModelSet::Status> models = api.models().list();
  for (const ModelSet::Status& model : models) {
    if (model.info) loaded.push_back(model.name);
  }
  return state_reply(without_ranks(api),
                     {{"status", "ready"}, {"model", models.front().name}, {"loaded", loaded}});
}

}  // namespace millrace::server
