// JSON that a client sent, read with a bound on its depth; and JSON printed as other programs print it.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace millrace::chat {

// Deeper nesting than this is refused: what reads the value may recurse.
inline constexpr size_t kMaxJsonDepth = 100;

// Throws Error{kBadInput} naming `what` for a text that is no JSON or nested too deeply.
nlohmann::ordered_json parse_json(std::string_view text, std::string_view what);
// Discarded (is_discarded) in place of throwing.
nlohmann::ordered_json try_parse_json(std::string_view text);

// Without white space as serde_json prints it: floats as ryu writes them (1.0, 1e16, 1e-5).
std::string compact_json(const nlohmann::ordered_json& value);

}  // namespace millrace::chat
