#include "response_input.h"

#include <fmt/core.h>

#include "api_error.h"
#include "chat/custom_tools.h"
#include "conversation.h"
#include "ids.h"

namespace millrace::server {
namespace {

// An assistant's reasoning, text and calls are items of their own here and one message to the model.
class MessageBuilder {
 public:
  explicit MessageBuilder(std::vector<chat::Message>& messages) : messages_(messages) {}

  chat::Message& assistant() {
    if (!open_) messages_.push_back({.role = "assistant"});
    open_ = true;
    return messages_.back();
  }
  void other(chat::Message message) {
    open_ = false;
    messages_.push_back(std::move(message));
  }
  void close() { open_ = false; }

 private:
  std::vector<chat::Message>& messages_;
  bool open_ = false;
};

std::string reasoning_text(const Fields& item) {
  std::string text = read_content(nullptr, "");
  for (const std::string_view key : {"content", "summary"}) {
    const Json* parts = item.array(key);
    if (parts == nullptr || !text.empty()) continue;
    for (size_t i = 0; i < parts->size(); ++i) {
      const Fields part((*parts)[i], element_path(item.path_of(key), i));
      text += part.text("text").value_or("");
    }
  }
  return text;
}

void read_message_item(const Fields& item, MessageBuilder& builder) {
  const std::string role = *[&] {
    auto given = item.choice("role", {"system", "developer", "user", "assistant"});
    if (!given)
      bad_field(item.path_of("role"), "is missing, expected a string", "missing_required_parameter");
    return given;
  }();
  if (!item.has("content"))
    bad_field(item.path_of("content"), "is missing, expected text", "missing_required_parameter");
  std::vector<chat::MessageImage> images;
  std::string text =
      read_content(item.find("content"), item.path_of("content"), role == "user" ? &images : nullptr);
  if (role != "assistant") {
    builder.other({.role = role, .content = std::move(text), .images = std::move(images)});
    return;
  }
  chat::Message& message = builder.assistant();
  message.content += text;
}

void read_item(const Fields& item, MessageBuilder& builder) {
  const std::string type = item.text("type").value_or("message");
  if (type == "message") {
    read_message_item(item, builder);
  } else if (type == "reasoning") {
    builder.assistant().reasoning += reasoning_text(item);
  } else if (type == "function_call") {
    builder.assistant().tool_calls.push_back({.id = item.required_text("call_id"),
                                              .name = item.required_text("name"),
                                              .arguments = item.text("arguments").value_or("{}")});
  } else if (type == "custom_tool_call") {
    builder.assistant().tool_calls.push_back(
        {.id = item.required_text("call_id"),
         .name = item.required_text("name"),
         .arguments = chat::custom_arguments(item.text("input").value_or(""))});
  } else if (type == "function_call_output" || type == "custom_tool_call_output") {
    chat::Message message{.role = "tool"};
    message.tool_call_id = item.required_text("call_id");
    message.content = read_content(item.find("output"), item.path_of("output"));
    builder.other(std::move(message));
  } else {
    item.refuse("type", fmt::format("found \"{}\", expected message, reasoning, function_call, "
                                    "function_call_output, custom_tool_call or custom_tool_call_output",
                                    type.substr(0, 60)));
  }
}

std::string_view id_prefix(const std::string& type) {
  if (type == "message") return "msg_";
  if (type == "reasoning") return "rs_";
  return type.ends_with("_output") ? "fco_" : "fc_";
}

// As it is listed: with an id, its type said, its text in parts.
Json listed_item(const Json& item) {
  Json out = {{"id", ""}, {"type", "message"}, {"status", "completed"}};
  for (const auto& [key, value] : item.items()) {
    if (!value.is_null()) out[key] = value;
  }
  const auto type = out["type"].get<std::string>();
  if (!out["id"].is_string() || out["id"] == "") out["id"] = new_id(id_prefix(type), 24);
  if (type == "message" && out["content"].is_string()) {
    const bool said = out["role"] == "assistant";
    Json part = {{"type", said ? "output_text" : "input_text"}, {"text", out["content"]}};
    if (said) part["annotations"] = Json::array();
    out["content"] = Json::array({std::move(part)});
  }
  return out;
}

void read_input(const Fields& fields, ResponseInput& out) {
  const Json* input = fields.find("input");
  if (input == nullptr) {
    bad_field("input", "is missing, expected a string or an array", "missing_required_parameter");
  }
  if (input->is_string()) {
    const Json message = {{"role", "user"}, {"content", *input}};
    out.items = read_items(Json::array({message}), "input", out.messages);
    return;
  }
  if (!input->is_array()) wrong_type("input", *input, "a string or an array of items");
  if (input->empty()) bad_field("input", "found an empty array, expected at least one item", "empty_array");
  out.items = read_items(*input, "input", out.messages);
}

// What was said before: by the responses up to one, or in a conversation.
void read_history(const Fields& fields, Api& api, const Client& client, ResponseInput& out) {
  if (const std::optional<std::string> previous = fields.text("previous_response_id")) {
    std::optional<StoredResponse> found = api.store().find(*previous, client.key_name);
    if (!found) {
      throw ApiError(404, fmt::format("the response '{}' is not stored here", previous->substr(0, 100)),
                     "previous_response_id", "previous_response_not_found");
    }
    if (found->cancel) fields.refuse("previous_response_id", "names a response that is still under way");
    out.messages = std::move(found->messages);
  }
  const Json* conversation = fields.find("conversation");
  if (conversation == nullptr) return;
  if (!out.messages.empty()) {
    fields.refuse("conversation", "is not allowed together with previous_response_id");
  }
  out.conversation_id = conversation->is_object() ? fields.object("conversation")->required_text("id")
                                                  : fields.required_text("conversation");
  const auto found = api.conversations().find(out.conversation_id, client.key_name);
  if (!found) {
    throw ApiError(
        404, fmt::format("the conversation '{}' is not stored here", out.conversation_id.substr(0, 100)),
        "conversation", "conversation_not_found");
  }
  Json items = Json::array();
  for (const StoredConversation::Item& item : found->items) items.push_back(Json::parse(item.json));
  read_items(items, "conversation", out.messages);
}

void read_tools(const Fields& fields, ResponseInput& out) {
  chat::Conversation& conversation = out.conversation;
  Json echo = Json::array();
  if (const Json* tools = fields.array("tools")) {
    for (size_t i = 0; i < tools->size(); ++i) {
      const Fields tool((*tools)[i], element_path("tools", i));
      conversation.tools.push_back(read_tool(tool, false));
      echo.push_back(tool.json());
    }
  }
  out.echo["tools"] = std::move(echo);
  const Json* choice = fields.find("tool_choice");
  out.echo["tool_choice"] = choice == nullptr ? Json("auto") : *choice;
  read_tool_choice(fields, conversation, false);
  conversation.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  out.echo["parallel_tool_calls"] = conversation.parallel_tool_calls;
}

void read_reasoning(const Fields& fields, ResponseInput& out) {
  Json echo = {{"effort", nullptr}, {"summary", nullptr}};
  if (const std::optional<Fields> reasoning = fields.object("reasoning")) {
    out.conversation.reasoning_effort = read_effort(*reasoning, "effort");
    if (const Json* effort = reasoning->find("effort")) echo["effort"] = *effort;
  }
  out.echo["reasoning"] = std::move(echo);
}

Json given_or(const Fields& fields, std::string_view key, Json otherwise) {
  const Json* value = fields.find(key);
  if (value != nullptr) return *value;
  return otherwise;
}

}  // namespace

Json read_items(const Json& items, const std::string& path, std::vector<chat::Message>& messages) {
  MessageBuilder builder(messages);
  Json listed = Json::array();
  for (size_t i = 0; i < items.size(); ++i) {
    const Fields item(items[i], element_path(path, i));
    read_item(item, builder);
    listed.push_back(listed_item(item.json()));
  }
  return listed;
}

ResponseInput read_response_input(const Fields& fields, Api& api, const Client& client) {
  ResponseInput out;
  out.stream = fields.boolean("stream").value_or(false);
  out.store = fields.boolean("store").value_or(true);
  out.background = fields.boolean("background").value_or(false);
  if (out.background && !out.store) fields.refuse("background", "needs store to be true");
  out.truncate = fields.choice("truncation", {"disabled", "auto"}) == "auto";
  const std::optional<std::string> instructions = fields.text("instructions");
  read_history(fields, api, client, out);
  out.echo = {
      {"background", out.background},
      {"instructions", instructions ? Json(*instructions) : Json(nullptr)},
      {"max_output_tokens", given_or(fields, "max_output_tokens", nullptr)},
      {"max_tool_calls", nullptr},
      {"metadata", given_or(fields, "metadata", Json::object())},
      {"previous_response_id", given_or(fields, "previous_response_id", nullptr)},
      {"conversation", out.conversation_id.empty() ? Json(nullptr) : Json({{"id", out.conversation_id}})},
      {"service_tier", "default"},
      {"store", out.store},
      {"temperature", given_or(fields, "temperature", 1.0)},
      {"top_p", given_or(fields, "top_p", 1.0)},
      {"top_logprobs", given_or(fields, "top_logprobs", 0)},
      {"truncation", out.truncate ? "auto" : "disabled"},
      {"user", given_or(fields, "user", nullptr)}};
  read_input(fields, out);
  read_tools(fields, out);
  read_reasoning(fields, out);
  if (const Json* include = fields.array("include")) {
    for (const Json& name : *include) out.logprobs = out.logprobs || name == "message.output_text.logprobs";
  }
  if (instructions) out.conversation.messages.push_back({.role = "system", .content = *instructions});
  out.conversation.messages.insert(out.conversation.messages.end(), out.messages.begin(), out.messages.end());
  return out;
}

}  // namespace millrace::server
