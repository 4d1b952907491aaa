#include "conversation.h"

#include <fmt/format.h>

#include <algorithm>

#include "api_error.h"
#include "base/work_budget.h"

namespace millrace::server {

std::string read_content(const Json* content, const std::string& path) {
  if (content == nullptr || content->is_null()) return {};
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) wrong_type(path, *content, "a string or an array of parts");
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    const Fields part((*content)[i], element_path(path, i));
    const std::string type = part.required_text("type");
    if (type == "text" || type == "input_text" || type == "output_text") {
      text += part.required_text("text");
    } else if (type == "refusal") {
      text += part.required_text("refusal");
    } else {
      part.refuse("type", fmt::format("found \"{}\", expected text: this model reads nothing else",
                                      type.substr(0, 60)));
    }
  }
  return text;
}

std::string read_schema(const Fields& fields, std::string_view key) {
  const std::optional<Fields> schema = fields.object(key);
  return schema ? schema->json().dump() : std::string();
}

chat::Tool read_function(const Fields& function) {
  chat::Tool tool;
  tool.name = function.required_text("name");
  const bool good = !tool.name.empty() && tool.name.size() <= 128 &&
                    std::all_of(tool.name.begin(), tool.name.end(), [](char c) {
                      return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
                             c == '_' || c == '-' || c == '.';
                    });
  if (!good) function.refuse("name", "expected 1 to 128 of the characters a-z A-Z 0-9 _ - .");
  tool.description = function.text("description").value_or("");
  tool.parameters = read_schema(function, "parameters");
  tool.strict = function.boolean("strict").value_or(false);
  return tool;
}

std::string read_effort(const Fields& fields, std::string_view key) {
  const auto effort = fields.choice(key, {"none", "minimal", "low", "medium", "high", "xhigh"});
  if (!effort) return {};
  if (*effort == "none" || *effort == "minimal") return "low";  // the least there is
  return *effort == "xhigh" ? "high" : *effort;
}

namespace {

chat::Message read_message(const Fields& fields) {
  chat::Message message;
  message.role = fields.required_text("role");
  constexpr std::string_view kRoles[] = {"system", "developer", "user", "assistant", "tool", "function"};
  if (std::find(std::begin(kRoles), std::end(kRoles), message.role) == std::end(kRoles)) {
    fields.refuse("role", fmt::format("found \"{}\", expected system, developer, user, assistant or tool",
                                      message.role.substr(0, 60)));
  }
  if (message.role == "function") message.role = "tool";
  message.content = read_content(fields.find("content"), fields.path_of("content"));
  message.name = fields.text("name").value_or("");
  message.tool_call_id = fields.text("tool_call_id").value_or("");
  if (message.role != "assistant") {
    if (!fields.has("content"))
      bad_field(fields.path_of("content"), "is missing, expected text", "missing_field");
    return message;
  }
  message.reasoning = fields.text("reasoning_content").value_or(fields.text("reasoning").value_or(""));
  if (const Json* calls = fields.array("tool_calls")) {
    for (size_t i = 0; i < calls->size(); ++i) {
      const Fields call((*calls)[i], element_path(fields.path_of("tool_calls"), i));
      const std::optional<Fields> function = call.object("function");
      if (!function) bad_field(call.path_of("function"), "is missing, expected an object", "missing_field");
      message.tool_calls.push_back({.id = call.text("id").value_or(""),
                                    .name = function->required_text("name"),
                                    .arguments = function->text("arguments").value_or("{}")});
    }
  }
  return message;
}

void read_tools(const Fields& fields, chat::Conversation& conversation) {
  const Json* tools = fields.array("tools");
  if (tools == nullptr) return;
  constexpr size_t kMaxTools = 1024;
  if (tools->size() > kMaxTools) fields.refuse("tools", fmt::format("expected at most {} tools", kMaxTools));
  for (size_t i = 0; i < tools->size(); ++i) {
    const Fields tool((*tools)[i], element_path(fields.path_of("tools"), i));
    const std::string type = tool.required_text("type");
    if (type != "function") {
      tool.refuse("type", fmt::format("found \"{}\", expected \"function\"", type.substr(0, 60)));
    }
    const std::optional<Fields> function = tool.object("function");
    if (!function) bad_field(tool.path_of("function"), "is missing, expected an object", "missing_field");
    conversation.tools.push_back(read_function(*function));
  }
}

void check_tool_choice(const chat::Conversation& conversation, const std::string& path) {
  using Choice = chat::ToolChoice;
  if (conversation.tool_choice == Choice::kAuto || conversation.tool_choice == Choice::kNone) return;
  if (conversation.tools.empty()) bad_field(path, "wants a tool to be called, expected some in tools");
  if (conversation.tool_choice != Choice::kNamed) return;
  const auto same = [&](const chat::Tool& tool) { return tool.name == conversation.named_tool; };
  if (std::none_of(conversation.tools.begin(), conversation.tools.end(), same)) {
    bad_field(path, fmt::format("names the tool \"{}\", which is not in tools",
                                conversation.named_tool.substr(0, 60)));
  }
}

}  // namespace

void read_tool_choice(const Fields& fields, chat::Conversation& conversation, bool nested) {
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) return;
  using Choice = chat::ToolChoice;
  if (choice->is_string()) {
    const std::string name = *fields.choice("tool_choice", {"none", "auto", "required"});
    conversation.tool_choice = name == "none"   ? Choice::kNone
                               : name == "auto" ? Choice::kAuto
                                                : Choice::kRequired;
  } else {
    const Fields named(*choice, fields.path_of("tool_choice"));
    named.choice("type", {"function"});
    const std::optional<Fields> function = nested ? named.object("function") : named;
    if (!function) bad_field(named.path_of("function"), "is missing, expected an object", "missing_field");
    conversation.tool_choice = Choice::kNamed;
    conversation.named_tool = function->required_text("name");
  }
  check_tool_choice(conversation, fields.path_of("tool_choice"));
}

chat::Conversation read_conversation(const Fields& fields) {
  chat::Conversation conversation;
  const Json* messages = fields.array("messages");
  if (messages == nullptr)
    bad_field(fields.path_of("messages"), "is missing, expected an array", "missing_field");
  if (messages->empty()) fields.refuse("messages", "found an empty array, expected at least one message");
  for (size_t i = 0; i < messages->size(); ++i) {
    spend_work(50);
    conversation.messages.push_back(
        read_message(Fields((*messages)[i], element_path(fields.path_of("messages"), i))));
  }
  read_tools(fields, conversation);
  read_tool_choice(fields, conversation, true);
  conversation.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  conversation.reasoning_effort = read_effort(fields, "reasoning_effort");
  conversation.template_variables = read_schema(fields, "chat_template_kwargs");
  return conversation;
}

}  // namespace millrace::server
