// Holds a harmony answer to tool_choice, strict tools and a grammar of the final text. Thinking stays free;
// what is held is every header, so that no text can avoid its grammar by a channel nobody looks at.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "chat/chat_codec.h"
#include "chat/format.h"
#include "chat/harmony_tokens.h"
#include "chat/plan_constraint.h"

namespace millrace::chat {

// `text`: text_mask of the vocabulary. Null when there is nothing to hold the answer to.
std::shared_ptr<const TokenConstraint> harmony_constraint(std::shared_ptr<const Codec> codec,
                                                          const Grammars& grammars,
                                                          const HarmonyTokens& tokens,
                                                          const std::vector<uint64_t>& text,
                                                          const Conversation& conversation,
                                                          std::shared_ptr<const grammar::Grammar> content);

}  // namespace millrace::chat
