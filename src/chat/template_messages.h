// A conversation in the shapes Hugging Face's chat templates expect.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>

#include "chat/format.h"
#include "chat/template_traits.h"

namespace millrace::chat {

// Sees every value that is the client's before it goes into the variables; `assistant`: of an earlier answer.
using Clean = std::function<void(nlohmann::ordered_json& value, bool assistant)>;

// messages, tools and the variables a template may know; conversation.template_variables come last and win.
nlohmann::ordered_json template_variables(const Conversation& conversation, const TemplateTraits& traits,
                                          const Clean& clean = {});

// The same without the messages but one, for what does not depend on them.
nlohmann::ordered_json short_variables(const Conversation& conversation, const TemplateTraits& traits);

// Whether the client asked for no thinking.
bool thinking_off(const Conversation& conversation);

}  // namespace millrace::chat
