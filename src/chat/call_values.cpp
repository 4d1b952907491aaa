#include "chat/call_values.h"

#include <cctype>
#include <nlohmann/json.hpp>

#include "base/utf8.h"
#include "chat/json_scanner.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

// Python's literals, and JSON's words for None, True and False.
class PythonReader {
 public:
  explicit PythonReader(std::string_view text) : text_(text) {}

  std::optional<std::string> arguments() {
    Json out = Json::object();
    for (space(); at_ < text_.size(); space()) {
      if (!out.empty() && !take(',')) return std::nullopt;
      space();
      if (at_ == text_.size() && !out.empty()) break;  // a comma may be the last
      const std::string key = word();
      space();
      if (key.empty() || !take('=')) return std::nullopt;
      if (!value(out[key], 0)) return std::nullopt;
    }
    return out.dump();
  }
  std::optional<Json> literal() {
    Json out;
    if (!value(out, 0)) return std::nullopt;
    space();
    return at_ == text_.size() ? std::optional<Json>(std::move(out)) : std::nullopt;
  }

 private:
  static constexpr int kMaxDepth = 64;

  void space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }
  bool take(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  std::string word() {
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 ||
                                  std::string_view("_-+.").find(text_[at_]) != std::string_view::npos ||
                                  (text_[at_] & 0x80) != 0)) {
      ++at_;
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  bool string(Json& out) {
    const char quote = text_[at_++];
    std::string text;
    while (at_ < text_.size() && text_[at_] != quote) {
      if (text_[at_] != '\\' || at_ + 1 == text_.size()) {
        text += text_[at_++];
        continue;
      }
      ++at_;
      escape(text);
    }
    if (!take(quote)) return false;
    out = valid_utf8(text);
    return true;
  }
  // Behind a backslash.
  void escape(std::string& text) {
    static constexpr std::string_view kNames = "ntrbf0", kMeanings{"\n\t\r\b\f\0", 6};
    const char c = text_[at_++];
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (const size_t which = kNames.find(c); which != std::string_view::npos) {
      text += kMeanings[which];
    } else if (digits > 0 && at_ + digits <= text_.size()) {
      uint32_t code = 0;
      for (const char d : text_.substr(at_, digits)) {
        if (std::isxdigit(static_cast<unsigned char>(d)) == 0) {
          text += '\\';
          text += c;
          return;
        }
        code = code * 16 + static_cast<uint32_t>(d <= '9' ? d - '0' : (d | 32) - 'a' + 10);
      }
      at_ += digits;
      append_utf8(text, code);
    } else if (c == '\\' || c == '\'' || c == '"') {
      text += c;
    } else if (c != '\n') {
      text += '\\';
      text += c;
    }
  }

  bool list(Json& out, char close, int depth) {
    out = Json::array();
    for (space(); !take(close); space()) {
      if (!out.empty() && !take(',')) return false;
      space();
      if (!out.empty() && take(close)) return true;
      out.emplace_back();
      if (!value(out.back(), depth + 1)) return false;
    }
    return true;
  }
  bool dictionary(Json& out, int depth) {
    out = Json::object();
    for (space(); !take('}'); space()) {
      if (!out.empty() && !take(',')) return false;
      space();
      if (!out.empty() && take('}')) return true;
      Json key;
      if (at_ == text_.size() || (text_[at_] != '"' && text_[at_] != '\'') || !string(key)) return false;
      space();
      if (!take(':') || !value(out[key.get<std::string>()], depth + 1)) return false;
    }
    return true;
  }

  bool value(Json& out, int depth) {
    space();
    if (at_ == text_.size() || depth > kMaxDepth) return false;
    const char c = text_[at_];
    if (c == '"' || c == '\'') return string(out);
    if (take('[')) return list(out, ']', depth);
    if (take('(')) return list(out, ')', depth);
    if (take('{')) return dictionary(out, depth);
    const std::string plain = word();
    if (plain == "None" || plain == "null") {
      out = nullptr;
    } else if (plain == "True" || plain == "true" || plain == "False" || plain == "false") {
      out = plain == "True" || plain == "true";
    } else {
      out = Json::parse(plain, nullptr, false);
      return out.is_number();
    }
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

std::string json_string(std::string_view text) { return Json(valid_utf8(text)).dump(); }

std::string tagged_value(std::string_view text, std::optional<bool> is_string) {
  if (is_string.value_or(false)) return json_string(text);
  std::string_view trimmed = text;
  while (!trimmed.empty() && is_space(trimmed.front())) trimmed.remove_prefix(1);
  while (!trimmed.empty() && is_space(trimmed.back())) trimmed.remove_suffix(1);
  const Json json = Json::parse(trimmed, nullptr, false);
  // A string in quotes where nobody says that it is one: the quotes are its own.
  if (!json.is_discarded() && (is_string || !json.is_string())) return std::string(trimmed);
  const std::optional<Json> python = PythonReader(trimmed).literal();
  if (python && (is_string || !python->is_string())) return python->dump();
  return json_string(text);
}

std::optional<std::string> python_arguments(std::string_view text) { return PythonReader(text).arguments(); }

}  // namespace millrace::chat
