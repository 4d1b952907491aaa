#include "response_input.h"

#include <fmt/format.h>

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
    if (!given) bad_field(item.path_of("role"), "is missing, expected a string", "missing_field");
    return given;
  }();
  if (!item.has("content")) bad_field(item.path_of("content"), "is missing, expected text", "missing_field");
  std::string text = read_content(item.find("content"), item.path_of("content"));
  if (role != "assistant") {
    builder.other({.role = role, .content = std::move(text)});
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

void read_input(const Fields& fields, ResponseInput& out) {
  const Json* input = fields.find("input");
  if (input == nullptr) bad_field("input", "is missing, expected a string or an array", "missing_field");
  MessageBuilder builder(out.messages);
  if (input->is_string()) {
    builder.other({.role = "user", .content = input->get<std::string>()});
    out.items.push_back({{"id", new_id("msg_", 24)},
                         {"type", "message"},
                         {"role", "user"},
                         {"content", Json::array({{{"type", "input_text"}, {"text", *input}}})}});
    return;
  }
  if (!input->is_array()) wrong_type("input", *input, "a string or an array of items");
  if (input->empty()) fields.refuse("input", "found an empty array, expected at least one item");
  for (size_t i = 0; i < input->size(); ++i) {
    const Fields item((*input)[i], element_path("input", i));
    read_item(item, builder);
    Json copy = item.json();
    if (!copy.contains("id") || !copy["id"].is_string()) copy["id"] = new_id("msg_", 24);
    if (!copy.contains("type")) copy["type"] = "message";
    out.items.push_back(std::move(copy));
  }
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

ResponseInput read_response_input(const Fields& fields, Api& api, const Client& client) {
  ResponseInput out;
  out.stream = fields.boolean("stream").value_or(false);
  out.store = fields.boolean("store").value_or(true);
  out.background = fields.boolean("background").value_or(false);
  if (out.background && out.stream) fields.refuse("background", "is not supported together with stream");
  if (out.background && !out.store) fields.refuse("background", "needs store to be true");
  fields.choice("truncation", {"disabled", "auto"});
  const std::optional<std::string> instructions = fields.text("instructions");
  const std::optional<std::string> previous = fields.text("previous_response_id");
  if (previous) {
    std::optional<StoredResponse> found = api.store().find(*previous, client.key_name);
    if (!found) {
      throw ApiError(404, fmt::format("the response '{}' is not stored here", previous->substr(0, 100)),
                     "previous_response_id", "previous_response_not_found");
    }
    if (found->cancel) fields.refuse("previous_response_id", "names a response that is still under way");
    out.messages = std::move(found->messages);
  }
  out.echo = {{"background", out.background},
              {"instructions", instructions ? Json(*instructions) : Json(nullptr)},
              {"max_output_tokens", given_or(fields, "max_output_tokens", nullptr)},
              {"max_tool_calls", nullptr},
              {"metadata", given_or(fields, "metadata", Json::object())},
              {"previous_response_id", previous ? Json(*previous) : Json(nullptr)},
              {"service_tier", "default"},
              {"store", out.store},
              {"temperature", given_or(fields, "temperature", 1.0)},
              {"top_p", given_or(fields, "top_p", 1.0)},
              {"top_logprobs", given_or(fields, "top_logprobs", 0)},
              {"truncation", "disabled"},
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
