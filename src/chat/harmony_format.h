// Harmony as a Format: gpt-oss and everything that has its control tokens.
#pragma once

#include <memory>

#include "chat/chat_codec.h"
#include "chat/format.h"
#include "chat/plan_constraint.h"

namespace millrace::chat {

// Null when the vocabulary does not have harmony's control tokens.
std::unique_ptr<Format> make_harmony_format(std::shared_ptr<const Codec> codec,
                                            std::shared_ptr<const Grammars> grammars);

}  // namespace millrace::chat
