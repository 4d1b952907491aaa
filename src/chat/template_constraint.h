// Holds the answer of a template's model to tool_choice, strict tools and a grammar of its text. Thinking,
// where the model may think, stays free up to </think>.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chat/chat_codec.h"
#include "chat/format.h"
#include "chat/plan_constraint.h"
#include "chat/template_traits.h"

namespace millrace::chat {

enum class Thinking {
  kNone,    // the model does not, or was told not to
  kMay,     // it can open <think>
  kOpened,  // the prompt ends in <think>
};

struct TemplateConstraintInput {
  std::shared_ptr<const Codec> codec;
  const Grammars& grammars;
  const std::vector<uint64_t>& text;  // text_mask of the vocabulary
  const TemplateTraits& traits;
  Thinking thinking;
  std::vector<int32_t> ends;  // tokens that end the turn, at least one
};

// Null when there is nothing to hold the answer to. A strict tool that the model may or may not call (auto)
// is held behind the marker that begins its calls; llama3 has none, and there an answer that begins with a
// brace is a call.
std::shared_ptr<const TokenConstraint> template_constraint(const TemplateConstraintInput& in,
                                                           const Conversation& conversation,
                                                           std::shared_ptr<const grammar::Grammar> content);

}  // namespace millrace::chat
