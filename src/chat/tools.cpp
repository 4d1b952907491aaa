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
  for (const Tool& tool : conversation.tools) {
    if (conversation.tool_choice != ToolChoice::kNamed || tool.name == conversation.named_tool) {
      out.push_back(&tool);
    }
  }
  return out;
}

std::shared_ptr<const grammar::Grammar> arguments_grammar(const Grammars& grammars, const Tool& tool,
                                                          const Conversation& conversation) {
  if (!tool.strict && !must_call(conversation)) return nullptr;
  if (tool.parameters.empty()) {
    return grammars.json_schema(R"({"type":"object","properties":{},"additionalProperties":false})");
  }
  try {
    return grammars.json_schema(tool.parameters);
  } catch (const Error& error) {
    if (tool.strict || error.code() != ErrorCode::kUnsupported) throw;
    return grammars.json_object();
  }
}

}  // namespace millrace::chat
