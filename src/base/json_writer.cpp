// JsonWriter: escapes and numbers; see json_writer.h.
#include "base/json_writer.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>

#include "base/utf8.h"

namespace millrace {
namespace {

bool is_plain(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\' && c != 0x7f; }

void append_escape(std::string& out, char c) {
  static constexpr char kHex[] = "0123456789abcdef";
  switch (c) {
    case '"':
      out += "\\\"";
      break;
    case '\\':
      out += "\\\\";
      break;
    case '\n':
      out += "\\n";
      break;
    case '\r':
      out += "\\r";
      break;
    case '\t':
      out += "\\t";
      break;
    default:
      out += "\\u00";
      out.push_back(kHex[(c >> 4) & 15]);
      out.push_back(kHex[c & 15]);
  }
}

// `text` is UTF-8.
void append_quoted(std::string& out, std::string_view text) {
  out.push_back('"');
  size_t plain = 0;  // start of what has not been copied
  for (size_t i = 0; i < text.size(); ++i) {
    if (is_plain(text[i])) continue;
    out.append(text, plain, i - plain);
    append_escape(out, text[i]);
    plain = i + 1;
  }
  out.append(text, plain, text.size() - plain);
  out.push_back('"');
}

void append_any(std::string& out, std::string_view text) {
  if (valid_utf8_prefix(text) == text.size()) {
    append_quoted(out, text);
  } else {
    append_quoted(out, valid_utf8(text));
  }
}

template <typename Float>
void append_number(std::string& out, Float number) {
  if (std::isfinite(number)) {
    fmt::format_to(std::back_inserter(out), "{}", number);
  } else {
    out += "null";
  }
}

}  // namespace

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  out_.push_back(bracket);
  after_value_ = false;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  out_.push_back(bracket);
  after_value_ = true;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  append_any(out_, name);
  out_.push_back(':');
  after_value_ = false;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  append_any(out_, text);
  after_value_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(float number) {
  separate();
  append_number(out_, number);
  after_value_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  separate();
  append_number(out_, number);
  after_value_ = true;
  return *this;
}

JsonWriter& JsonWriter::integer(int64_t number) {
  const fmt::format_int digits(number);
  return raw({digits.data(), digits.size()});
}

JsonWriter& JsonWriter::integer(uint64_t number) {
  const fmt::format_int digits(number);
  return raw({digits.data(), digits.size()});
}

JsonWriter& JsonWriter::raw(std::string_view json) {
  if (json.empty()) return *this;
  separate();
  out_.append(json);
  after_value_ = true;
  return *this;
}

std::string json_string(std::string_view text) {
  std::string out;
  append_any(out, text);
  return out;
}

}  // namespace millrace
