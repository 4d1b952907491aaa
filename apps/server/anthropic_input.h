// What a request of Anthropic's messages API says, as a conversation.
#pragma once

#include <string>
#include <vector>

#include "chat/format.h"
#include "constraints.h"
#include "json_fields.h"

namespace millrace::server {

struct MessagesInput {
  chat::Conversation conversation = {};
  Constraints::Grammar content = {};  // what the final text is held to; null: nothing
  // Thoughts are shown only to those who asked for them: others read the first block as the answer.
  bool thinking = false;
  bool omit_thinking = false;  // ... as blocks without text
};

// system, messages, tools, tool_choice, thinking, output_config. max_tokens: what the answer may have, above
// which no budget for thinking may lie; 0: not known.
MessagesInput read_messages_input(const Fields& fields, Constraints& constraints, int64_t max_tokens);

}  // namespace millrace::server
