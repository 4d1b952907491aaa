// Formats that follow a model's own chat template. What the template can do is found by trying it: whether it
// takes a system message, whether it tells the model about tools and how it writes calls, whether it knows
// enable_thinking. A spelling of calls that is not listed is learned (call_shape.h). A template that knows
// nothing of tools, or whose calls cannot be read back, gets them in its system message, hermes style.
#pragma once

#include <memory>

#include "chat/chat_codec.h"
#include "chat/format.h"
#include "chat/plan_constraint.h"

namespace millrace::chat {

std::unique_ptr<Format> make_template_format(std::shared_ptr<const Codec> codec,
                                             std::shared_ptr<const Grammars> grammars);

}  // namespace millrace::chat
