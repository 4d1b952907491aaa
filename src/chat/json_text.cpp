#include "chat/json_text.h"

#include <array>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/json_tree.h"
#include "base/utf8.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

std::string number_text(double value) {
  if (!std::isfinite(value)) return "null";
  std::array<char, 32> buffer{};
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
  const std::string text(buffer.data(), end.ptr);  // d.ddde[+-]xx, the fewest digits that read back the same
  const size_t e = text.find('e');
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  const std::string sign = text[0] == '-' ? "-" : "";
  const int exponent = std::stoi(text.substr(e + 1));
  const int count = static_cast<int>(digits.size());
  const int point = exponent + 1;  // digits before the decimal point
  if (value == 0.0) return sign + "0.0";
  if (count <= point && point <= 16)
    return sign + digits + std::string(static_cast<size_t>(point - count), '0') + ".0";
  if (0 < point && point <= 16) return sign + digits.insert(static_cast<size_t>(point), ".");
  if (-5 < point && point <= 0) return sign + "0." + std::string(static_cast<size_t>(-point), '0') + digits;
  if (count > 1) digits.insert(1, ".");
  return sign + digits + "e" + std::to_string(exponent);
}

void append_json(const Json& value, std::string& out) {
  bool first = true;
  if (value.is_object()) {
    out += '{';
    for (const auto& [name, item] : value.items()) {
      if (!first) out += ',';
      first = false;
      out += Json(name).dump() + ":";
      append_json(item, out);
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    for (const Json& item : value) {
      if (!first) out += ',';
      first = false;
      append_json(item, out);
    }
    out += ']';
  } else if (value.is_number_float()) {
    out += number_text(value.get<double>());
  } else {
    out += value.dump();
  }
}

}  // namespace

Json try_parse_json(std::string_view text) {
  try {
    return parse_json_tree(valid_utf8(text), {.depth = kMaxJsonDepth, .last_key_wins = true});
  } catch (const JsonTextError&) {
    return Json::value_t::discarded;
  }
}

Json parse_json(std::string_view text, std::string_view what) {
  Json value = try_parse_json(text);
  if (value.is_discarded()) {
    throw_error(ErrorCode::kBadInput, "{}: found no JSON or more than {} levels of it, expected JSON", what,
                kMaxJsonDepth);
  }
  return value;
}

std::string compact_json(const Json& value) {
  std::string out;
  append_json(value, out);
  return out;
}

}  // namespace millrace::chat
