// Tools as gpt-oss was taught to read them: JSON schemas written as TypeScript types in a namespace. Byte for
// byte what openai-harmony writes, its oddities included: the model has seen nothing else.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"

namespace millrace::chat {

// The type of a value that follows `schema`, its lines behind `indent`.
std::string typescript_type(const nlohmann::ordered_json& schema, const std::string& indent);

// "# Tools ... namespace functions { ... } // namespace functions". Throws Error{kBadInput} for parameters
// that are no JSON.
std::string typescript_tools(const std::vector<Tool>& tools);

}  // namespace millrace::chat
