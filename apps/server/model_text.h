// What a server needs of a model beside its weights, looked at before those are loaded: its tokenizer and its
// chat template.
#pragma once

#include <string>

namespace millrace::server {

// Opens both as the engine will, and renders one message. Throws Error with the reason when one cannot be
// used; false: there is no template, and chats will be refused.
bool check_model_text(const std::string& path);

// For the log and the terminal, where there is no template.
inline constexpr const char* kNoTemplate =
    "the model has no chat template: completions are served, chats are refused";

}  // namespace millrace::server
