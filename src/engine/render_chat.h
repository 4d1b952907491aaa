// From a conversation to the text a model expects.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "jinja/chat_template.h"
#include "millrace/request.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

// `variables` holds messages and whatever else the template knows; what is absent of bos_token, eos_token and
// add_generation_prompt (true: the assistant is to answer) is added.
std::string render_chat(const ChatTemplate& chat_template, const Tokenizer& tokenizer,
                        nlohmann::ordered_json variables);
nlohmann::ordered_json to_json(const std::vector<ChatMessage>& messages);

}  // namespace millrace
