// A conversation in harmony, token by token: what openai-harmony's render_conversation_for_completion gives.
//
//   <|start|>system<|message|>..<|end|>  who the model is, dates, effort, channels
//   <|start|>developer<|message|>..<|end|>  instructions, tools, response format
//   <|start|>user<|message|>..<|end|>
//   <|start|>assistant<|channel|>analysis<|message|>..<|end|>
//   <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>..<|call|>
//   <|start|>functions.f to=assistant<|channel|>commentary<|message|>..<|end|>
//   <|start|>assistant
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "chat/chat_codec.h"
#include "chat/format.h"
#include "chat/harmony_tokens.h"

namespace millrace::chat {

// Texts behind the first `max_tokens` are not tokenized: Format::prompt.
std::vector<int32_t> render_harmony(const Codec& codec, const HarmonyTokens& tokens,
                                    const Conversation& conversation,
                                    size_t max_tokens = std::numeric_limits<size_t>::max());

// The recipient that a tool of this name has: functions.NAME, except for gpt-oss's own (python, browser.*)
// where the client has no tool so called.
std::string harmony_recipient(const std::string& name, const Conversation& conversation);

// Today as YYYY-MM-DD.
std::string today();

}  // namespace millrace::chat
