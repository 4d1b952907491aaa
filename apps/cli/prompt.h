// From what a person says to the tokens a model expects: the chat template rendered and encoded.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "millrace/engine.h"

namespace millrace::cli {

// [{"role": "user", "content": ...}, ...]
using Messages = nlohmann::ordered_json;

void add_message(Messages& messages, const std::string& role, const std::string& content);

// The conversation through the model's chat template, ready for the assistant to answer. Throws Error when
// the model has none that can be used.
std::vector<int32_t> encode_chat(const Engine& engine, const Messages& messages);

using millrace::valid_utf8;

}  // namespace millrace::cli
