// From what a person says to the tokens a model expects: the chat template rendered and encoded.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "engine/runtime.h"

namespace millrace::cli {

// [{"role": "user", "content": ...}, ...]
using Messages = nlohmann::ordered_json;

void add_message(Messages& messages, const std::string& role, const std::string& content);

// The conversation through the model's chat template, ready for the assistant to answer. The runtime must
// have one.
std::string render_chat(Runtime& runtime, const Messages& messages);
std::vector<int32_t> encode_chat(Runtime& runtime, const Messages& messages);

using millrace::valid_utf8;

}  // namespace millrace::cli
