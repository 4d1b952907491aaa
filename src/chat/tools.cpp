#include "chat/tools.h"

#include <algorithm>

#include "base/error.h"
#include "base/utf8.h"

namespace millrace::chat {

bool offers_tools(const Conversation& conversation) {
  return !conversation.tools.empty() && conversation.tool_choice != ToolChoice::kNone;
}

bool must_call(const Conversation& conversation) {
  return conversation.tool_choice == ToolChoice::kRequired || conversation.tool_choice == ToolChoice::kNamed;
}

void check_tool_choice(const Conversation& conversation) {
  if (!must_call(conversation)) return;
  if (conversation.tools.empty()) {
    throw_error(ErrorCode::kBadInput,
                "tool_choice: a call is required and no tools were given, expected some");
  }
  if (callable_tools(conversation).empty()) {
    throw_error(ErrorCode::kBadInput, "tool_choice: {} is none of the tools given",
                valid_utf8(conversation.named_tool));
  }
}

std::vector<const Tool*> callable_tools(const Conversation& conversation) {
  std::vector<const Tool*> out;
  if (!offers_tools(conversation)) return out;
  const std::vector<std::string>& allowed = conversation.allowed_tools;
  for (const Tool& tool : conversation.tools) {
    const bool is_callable =
        conversation.tool_choice == ToolChoice::kNamed
            ? tool.name == conversation.named_tool
            : allowed.empty() || std::find(allowed.begin(), allowed.end(), tool.name) != allowed.end();
    if (is_callable) out.push_back(&tool);
  }
  return out;
}

bool holds_free_calls(const Conversation& conversation) {
  if (!offers_tools(conversation) || must_call(conversation)) return false;
  return callable_tools(conversation).size() < conversation.tools.size() ||
         std::any_of(conversation.tools.begin(), conversation.tools.end(),
                     [](const Tool& tool) { return tool.strict; });
}

bool holds_tools(const Conversation& conversation) {
  const bool forbids = conversation.tool_choice == ToolChoice::kNone && !conversation.tools.empty();
  return forbids || must_call(conversation) || holds_free_calls(conversation);
}

bool many_calls(const Conversation& conversation) {
  return conversation.parallel_tool_calls && conversation.tool_choice != ToolChoice::kNamed;
}

std::shared_ptr<const grammar::Grammar> arguments_grammar(const Grammars& grammars, const Tool& tool,
                                                          const Conversation& conversation) {
  if (!tool.strict && !must_call(conversation)) return nullptr;
  if (tool.parameters.empty()) {
    return grammars.json_schema(R"({"type":"object","properties":{},"additionalProperties":false})",
                                grammar::Objects::kClosed);
  }
  try {
    return grammars.json_schema(tool.parameters,
                                tool.strict ? grammar::Objects::kStrict : conversation.objects);
  } catch (const Error& error) {
    if (tool.strict || error.code() != ErrorCode::kUnsupported) throw;
    return grammars.json_object();
  }
}

}  // namespace millrace::chat
