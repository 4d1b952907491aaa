// A conversation in the shapes Hugging Face's chat templates expect.
#pragma once

#include <nlohmann/json.hpp>

#include "chat/format.h"
#include "chat/template_traits.h"

namespace millrace::chat {

// messages, tools and the variables a template may know; conversation.template_variables come last and win.
nlohmann::ordered_json template_variables(const Conversation& conversation, const TemplateTraits& traits);

// The same without the messages but one, for what does not depend on them.
nlohmann::ordered_json short_variables(const Conversation& conversation, const TemplateTraits& traits);

// Whether the client asked for no thinking.
bool thinking_off(const Conversation& conversation);

}  // namespace millrace::chat
