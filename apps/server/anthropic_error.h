// Errors as Anthropic's clients expect them, {"type": "error", "error": {"type", "message"}}, for the paths
// under which its API is spoken.
#pragma once

#include <string>
#include <string_view>

#include "api_error.h"

namespace millrace::server {

bool is_anthropic_path(std::string_view path);  // /v1/messages and what lies under it

std::string anthropic_error_body(const ApiError& error);

}  // namespace millrace::server
