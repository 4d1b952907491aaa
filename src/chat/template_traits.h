// What a chat template can do, found by rendering small conversations with it.
#pragma once

#include <string>

#include "chat/call_shape.h"
#include "chat/chat_codec.h"
#include "chat/template_answer_parser.h"

namespace millrace::chat {

struct TemplateTraits {
  Family family = Family::kHermes;  // how calls are written; our own way where the template has none
  bool native_tools = false;        // the template itself tells of tools, writes calls and results
  bool told_otherwise = false;      // it tells of tools, but no call of its own could be read back
  bool system_role = false;         // takes a system message
  bool many_calls = false;          // several calls in one message
  bool thinking_switch = false;     // enable_thinking changes what it writes
  bool named_arguments = false;     // mistral: NAME[ARGS]{..} rather than a list of objects
  CallShape shape = {};             // of kShaped, and of kHermes with other marks than <tool_call>
  std::string rendered = {};        // what it made of the conversation with tools, to look for tokens in
};

TemplateTraits probe_template(const Codec& codec);

}  // namespace millrace::chat
