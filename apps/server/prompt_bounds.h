// What cannot fit the context is refused by a bound on its bytes, before it is rendered or tokenized.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "json_fields.h"
#include "millrace/engine.h"
#include "prompts.h"

namespace millrace::server {

// Throw ApiError{400, context_length_exceeded}, naming the field. What passes may still be too long.
void check_text_may_fit(const Engine& engine, std::string_view text, std::string_view path);
// By their number alone, before they are read; null and what is no array passes.
void check_messages_may_fit(const Engine& engine, const Json* messages, std::string_view path);
// The fewest tokens that this message can take in a prompt.
size_t least_tokens(const Engine& engine, const chat::Message& message);
void check_conversation_may_fit(const Engine& engine, const chat::Conversation& conversation,
                                std::string_view path);

// Its tokens, which it loses. Throws ApiError{400}, so that the complaint says which of many it is: none, or
// more than the context.
std::vector<int32_t> prompt_tokens(Prompt& prompt, const Engine& engine);

// Where tokens are counted or listed the context is no limit, but this is.
size_t most_listed(const Engine& engine);
// Throw ApiError{400} for what has more, or cannot have less.
void check_countable(const Engine& engine, size_t tokens, std::string_view path);
void check_conversation_countable(const Engine& engine, const chat::Conversation& conversation,
                                  std::string_view path);

}  // namespace millrace::server
