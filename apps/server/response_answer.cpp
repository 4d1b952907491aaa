#include "response_answer.h"

#include "api_error.h"
#include "chat/custom_tools.h"
#include "conversations.h"
#include "ids.h"

namespace millrace::server {
namespace {

std::string dump(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

ResponseAnswer::ResponseAnswer(Api& api, ModelLease model, ResponseInput input, const Request& request,
                               std::string owner, Headers headers, Timeline::Entry entry)
    : api_(api),
      id_(entry.id),
      owner_(std::move(owner)),
      input_(std::move(input)),
      headers_(std::move(headers)),
      log_(input_.store && (input_.stream || input_.background) ? std::make_shared<ResponseLog>() : nullptr),
      generation_(std::move(model), api.timeline(), {request}, std::move(entry)),
      reader_(generation_.model().engine(), generation_.model().format().parser(input_.conversation),
              input_.logprobs, {}) {}

// Whoever follows is not left waiting, however it came to an end.
ResponseAnswer::~ResponseAnswer() {
  if (log_) log_->end();
}

// ---------------------------------------------------------------- events

template <typename WriteMembers>
void ResponseAnswer::event(std::string& out, std::string_view type, WriteMembers write_members) {
  // Nobody waits for one in the background: those who read its events read the log.
  const bool sends = input_.stream && !input_.background;
  if (!sends && !log_) return;
  std::string text;
  text.append("event: ").append(type).append("\ndata: ");
  JsonWriter json(text);
  json.begin_object().field("type", type).field("sequence_number", sequence_++);
  write_members(json);
  json.end_object();
  text += "\n\n";
  if (sends) out += text;
  if (log_) log_->append(std::move(text));
}

void ResponseAnswer::response_event(std::string& out, std::string_view type, std::string_view body) {
  event(out, type, [&](JsonWriter& json) { json.key("response").raw(body); });
}

void ResponseAnswer::item_event(std::string& out, std::string_view type, const Json& item) {
  event(out, type,
        [&](JsonWriter& json) { json.field("output_index", items_.size() - 1).key("item").raw(dump(item)); });
}

void ResponseAnswer::write_place(JsonWriter& json) const {
  json.field("output_index", items_.size() - 1).field("item_id", items_.back().id);
}

// ---------------------------------------------------------------- what has come

bool ResponseAnswer::advance(std::string& out, size_t max_bytes) {
  while (out.size() < max_bytes) {
    const std::optional<Generation::Item> item = generation_.next();
    if (!item) break;
    take(item->event, out);
  }
  return generation_.done();
}

void ResponseAnswer::take(const Event& event_in, std::string& out) {
  if (event_in.kind == Event::Kind::kFailed && !began_ && !input_.background) return;  // an HTTP error
  if (!began_) {
    began_ = true;
    const std::string now = dump(body());
    response_event(out, "response.created", now);
    response_event(out, "response.in_progress", now);
  }
  for (const chat::Delta& delta : reader_.take(event_in)) {
    switch (delta.kind) {
      case chat::Delta::Kind::kReasoning:
        add_text(OutputItem::Kind::kReasoning, delta, out);
        break;
      case chat::Delta::Kind::kContent:
        add_text(OutputItem::Kind::kMessage, delta, out);
        break;
      case chat::Delta::Kind::kToolCall:
        close(out);
        open(OutputItem::Kind::kCall, out, reader_.calls()[static_cast<size_t>(delta.call)]);
        break;
      case chat::Delta::Kind::kToolArguments:
        add_text(OutputItem::Kind::kCall, delta, out);
        break;
    }
  }
  if (event_in.kind != Event::Kind::kToken) finish(event_in, out);
}

void ResponseAnswer::add_text(OutputItem::Kind kind, const chat::Delta& delta, std::string& out) {
  if (items_.empty() || items_.back().done || items_.back().kind != kind) {
    close(out);
    open(kind, out);
  }
  OutputItem& item = items_.back();
  item.text += delta.text;
  const auto write_delta = [&](JsonWriter& json) {
    write_place(json);
    json.field("delta", delta.text);
    if (kind != OutputItem::Kind::kCall) json.field("content_index", 0);
  };
  if (kind == OutputItem::Kind::kCall) {
    event(out,
          item.custom ? "response.custom_tool_call_input.delta" : "response.function_call_arguments.delta",
          write_delta);
  } else if (kind == OutputItem::Kind::kReasoning) {
    event(out, "response.reasoning_text.delta", write_delta);
  } else {
    const std::string logprobs = reader_.take_logprobs();
    JsonWriter::continuing(item.logprobs).raw(logprobs);
    event(out, "response.output_text.delta", [&](JsonWriter& json) {
      write_delta(json);
      json.key("logprobs").begin_array().raw(logprobs).end_array();
    });
  }
}

// `call`: the one that begins, of an item for a call.
void ResponseAnswer::open(OutputItem::Kind kind, std::string& out, const ReadCall& call) {
  const std::string_view prefix = kind == OutputItem::Kind::kReasoning ? "rs_"
                                  : kind == OutputItem::Kind::kMessage ? "msg_"
                                  : call.custom                        ? "ctc_"
                                                                       : "fc_";
  items_.push_back({.kind = kind,
                    .id = new_id(prefix, 24),
                    .text = {},
                    .name = call.name,
                    .call_id = call.id,
                    .logprobs = {},
                    .done = false,
                    .custom = call.custom,
                    .cut = false});
  Json item = item_json(items_.back());
  if (kind != OutputItem::Kind::kCall) item["content"] = Json::array();
  item_event(out, "response.output_item.added", item);
  if (kind == OutputItem::Kind::kCall) return;
  event(out, "response.content_part.added", [&](JsonWriter& json) {
    write_place(json);
    json.field("content_index", 0).key("part").begin_object();
    if (kind == OutputItem::Kind::kMessage) {
      json.field("type", "output_text").field("text", "");
      json.key("annotations").begin_array().end_array().key("logprobs").begin_array().end_array();
    } else {
      json.field("type", "reasoning_text").field("text", "");
    }
    json.end_object();
  });
}

void ResponseAnswer::close(std::string& out, bool cut) {
  if (items_.empty() || items_.back().done) return;
  OutputItem& item = items_.back();
  item.done = true;
  item.cut = cut;
  const Json whole = item_json(item);
  if (item.kind == OutputItem::Kind::kCall) {
    event(out, item.custom ? "response.custom_tool_call_input.done" : "response.function_call_arguments.done",
          [&](JsonWriter& json) {
            write_place(json);
            if (!item.custom) json.field("name", item.name);
            json.field(item.custom ? "input" : "arguments", item.text);
          });
  } else {
    const bool reasoning = item.kind == OutputItem::Kind::kReasoning;
    event(out, reasoning ? "response.reasoning_text.done" : "response.output_text.done",
          [&](JsonWriter& json) {
            write_place(json);
            json.field("content_index", 0).field("text", item.text);
            if (!reasoning) json.key("logprobs").begin_array().raw(item.logprobs).end_array();
          });
    event(out, "response.content_part.done", [&](JsonWriter& json) {
      write_place(json);
      json.field("content_index", 0).key("part").raw(dump(whole["content"][0]));
    });
  }
  item_event(out, "response.output_item.done", whole);
}

void ResponseAnswer::finish(const Event& event_in, std::string& out) {
  if (generation_.failure()) {
    fail(out);
    return;
  }
  // Nothing at all is still a message: clients look for one.
  if (items_.empty()) open(OutputItem::Kind::kMessage, out);
  const bool length = finish_name(event_in.finish) == "length";
  close(out, length || event_in.finish == FinishReason::kCancelled);
  if (event_in.finish == FinishReason::kCancelled) {
    status_ = "cancelled";
  } else if (length) {
    status_ = "incomplete";
    incomplete_ = "max_output_tokens";
  } else {
    status_ = "completed";
  }
  ended_ = true;
  add_to_conversation();
  const std::string_view name = status_ == "completed"    ? "response.completed"
                                : status_ == "incomplete" ? "response.incomplete"
                                                          : "response.failed";
  response_event(out, name, dump(body()));
  if (input_.store) store({});
  if (log_) log_->end();
}

// Behind its beginning: an event that says what went wrong, and the response as far as it came.
void ResponseAnswer::fail(std::string& out) {
  close(out, true);
  status_ = "failed";
  ended_ = true;
  const ApiError& error = *generation_.failure();
  event(out, "error", [&](JsonWriter& json) {
    json.text_or_null("code", error.code).field("message", error.message);
    json.text_or_null("param", error.param);
  });
  response_event(out, "response.failed", dump(body()));
  if (input_.store) store({});
  if (log_) log_->end();
}

void ResponseAnswer::add_to_conversation() {
  if (input_.conversation_id.empty() || status_ == "cancelled") return;
  std::vector<StoredConversation::Item> items = stored_items(input_.items);
  for (StoredConversation::Item& item : stored_items(body()["output"])) items.push_back(std::move(item));
  try {
    append_items(api_, input_.conversation_id, owner_,
                 items);  // one that was deleted meanwhile stays deleted
  } catch (const ApiError& error) {
    api_.log().write("warn", "an answer was not added to its conversation",
                     {{"response", id_}, {"reason", error.message}});
  }
}

// ---------------------------------------------------------------- in JSON

Json ResponseAnswer::item_json(const OutputItem& item) const {
  const char* status = !item.done ? "in_progress" : item.cut ? "incomplete" : "completed";
  switch (item.kind) {
    case OutputItem::Kind::kReasoning:
      return {{"id", item.id},
              {"type", "reasoning"},
              {"summary", Json::array()},
              {"content", Json::array({{{"type", "reasoning_text"}, {"text", item.text}}})},
              {"status", status}};
    case OutputItem::Kind::kCall:
      return {{"id", item.id},
              {"type", item.custom ? "custom_tool_call" : "function_call"},
              {"call_id", item.call_id},
              {"name", item.name},
              {item.custom ? "input" : "arguments", item.text},
              {"status", status}};
    case OutputItem::Kind::kMessage:
      break;
  }
  return {{"id", item.id},
          {"type", "message"},
          {"role", "assistant"},
          {"content", Json::array({{{"type", "output_text"},
                                    {"text", item.text},
                                    {"annotations", Json::array()},
                                    {"logprobs", Json::parse("[" + item.logprobs + "]")}}})},
          {"status", status}};
}

Json ResponseAnswer::body() const {
  Json output = Json::array();
  for (const OutputItem& item : items_) output.push_back(item_json(item));
  const Generation::Totals& t = generation_.totals();
  Json response = {{"id", id_}, {"object", "response"}, {"created_at", created_}, {"status", status_}};
  response["error"] = nullptr;
  if (generation_.failure()) {
    const bool theirs = generation_.failure()->status < 500;
    response["error"] = {{"code", theirs ? "invalid_prompt" : "server_error"},
                         {"message", generation_.failure()->message}};
  }
  response["incomplete_details"] = incomplete_.empty() ? Json(nullptr) : Json({{"reason", incomplete_}});
  response["model"] = generation_.model().id();
  response["output"] = std::move(output);
  for (const auto& [key, value] : input_.echo.items()) response[key] = value;
  response["usage"] = nullptr;
  if (ended_) {
    response["usage"] = {{"input_tokens", t.prompt},
                         {"input_tokens_details", {{"cached_tokens", t.cached}}},
                         {"output_tokens", t.generated},
                         {"output_tokens_details", {{"reasoning_tokens", reader_.reasoning_tokens()}}},
                         {"total_tokens", t.prompt + t.generated}};
  }
  return response;
}

std::string ResponseAnswer::running_body() const { return dump(body()); }

std::vector<chat::Message> ResponseAnswer::messages() const {
  std::vector<chat::Message> all = input_.messages;
  chat::Message answer{.role = "assistant", .content = reader_.content()};
  answer.reasoning = reader_.reasoning();
  for (const ReadCall& call : reader_.calls()) {
    answer.tool_calls.push_back(
        {.id = call.id,
         .name = call.name,
         .arguments = call.custom ? chat::custom_arguments(call.arguments) : call.arguments});
  }
  all.push_back(std::move(answer));
  return all;
}

void ResponseAnswer::store(std::function<void()> cancel) {
  // Deleted while it ran: it stays deleted.
  if (input_.background && ended_ && !api_.store().contains(id_)) return;
  api_.store().put({.id = id_,
                    .owner = owner_,
                    .body = dump(body()),
                    .input_items = input_.items,
                    .messages = messages(),
                    .cancel = std::move(cancel),
                    .events = log_});
}

std::optional<HttpResponse> ResponseAnswer::response() {
  if (generation_.failure() && !began_) return error_response(*generation_.failure());
  if (input_.stream || !generation_.done()) return std::nullopt;
  if (generation_.failure()) return error_response(*generation_.failure());
  return HttpResponse{.body = dump(body()), .headers = headers_};
}

}  // namespace millrace::server
