// From what a person says to the tokens a model expects: the chat template rendered and encoded.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/runtime.h"

namespace millrace::cli {

// [{"role": "user", "content": ...}, ...]
using Messages = nlohmann::ordered_json;

void add_message(Messages& messages, const std::string& role, const std::string& content);

// The conversation through the model's chat template, ready for the assistant to answer. The runtime must
// have one.
std::string render_chat(Runtime& runtime, const Messages& messages);
std::vector<int32_t> encode_chat(Runtime& runtime, const Messages& messages);

// Text replaced where it is not UTF-8: JSON and templates take nothing else.
std::string valid_utf8(std::string_view text);

}  // namespace millrace::cli
