// Python's view of text over UTF-8; see python_text.h. The tables are generated from Python itself.
#include "jinja/python_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>

#include "jinja/python_unicode.h"

namespace millrace::jinja {
namespace {

bool in_class(std::span<const CodePointRange> ranges, char32_t c) {
  auto it = std::upper_bound(ranges.begin(), ranges.end(), c,
                             [](char32_t value, const CodePointRange& r) { return value < r.first; });
  return it != ranges.begin() && c <= std::prev(it)->last;
}

void append_case(std::string& out, char32_t c, std::span<const CaseRange> runs,
                 std::span<const CaseSpecial> specials) {
  auto special = std::lower_bound(specials.begin(), specials.end(), c,
                                  [](const CaseSpecial& s, char32_t value) { return s.code_point < value; });
  if (special != specials.end() && special->code_point == c) {
    out += special->text;
    return;
  }
  auto it = std::upper_bound(runs.begin(), runs.end(), c,
                             [](char32_t value, const CaseRange& r) { return value < r.first; });
  // Runs of stride 2 may interleave, so the one that holds c can be a few entries back.
  for (int back = 0; it != runs.begin() && back < 3; ++back) {
    --it;
    if (c <= it->last && (c - it->first) % it->stride == 0) {
      append_utf8(out, static_cast<char32_t>(static_cast<int64_t>(c) + it->delta));
      return;
    }
  }
  append_utf8(out, c);
}

bool is_cased(char32_t c) { return is_upper(c) || is_lower(c); }

bool is_line_end(char32_t c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

bool contains(std::string_view set, char32_t c) {
  for (size_t i = 0; i < set.size();) {
    if (next_code_point(set, i) == c) return true;
  }
  return false;
}

bool strips(const std::string_view* chars, char32_t c) {
  return chars == nullptr ? is_space(c) : contains(*chars, c);
}

}  // namespace

bool is_valid_utf8(std::string_view text) { return valid_utf8_prefix(text) == text.size(); }

int64_t count_code_points(std::string_view text) {
  int64_t count = 0;
  for (char c : text) count += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return count;
}

size_t byte_offset(std::string_view text, int64_t index) {
  size_t i = 0;
  for (; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80 && index-- == 0) return i;
  }
  return i;
}

char32_t next_code_point(std::string_view text, size_t& position) {
  auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  char32_t first = byte(position);
  size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  char32_t c = length == 1 ? first : first & (0xffu >> (length + 1));
  for (size_t k = 1; k < length; ++k) c = (c << 6) | (byte(position + k) & 0x3f);
  position = std::min(position + length, text.size());
  return c;
}

std::vector<std::string_view> split_code_points(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t i = 0; i < text.size();) {
    size_t begin = i;
    next_code_point(text, i);
    parts.push_back(text.substr(begin, i - begin));
  }
  return parts;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}
bool is_alpha(char32_t c) { return in_class(kAlpha, c); }
bool is_digit(char32_t c) { return in_class(kDigit, c); }
bool is_decimal(char32_t c) { return in_class(kDecimal, c); }
bool is_numeric(char32_t c) { return in_class(kNumeric, c); }
bool is_upper(char32_t c) { return in_class(kUpperClass, c); }
bool is_lower(char32_t c) { return in_class(kLowerClass, c); }
bool is_printable(char32_t c) { return !in_class(kUnprintable, c); }

std::string_view strip_left(std::string_view text, const std::string_view* chars) {
  for (size_t i = 0; i < text.size();) {
    size_t begin = i;
    if (!strips(chars, next_code_point(text, i))) return text.substr(begin);
  }
  return text.substr(text.size());
}

std::string_view strip_right(std::string_view text, const std::string_view* chars) {
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) --begin;
    size_t at = begin;
    if (!strips(chars, next_code_point(text, at))) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    size_t at = i;
    char32_t c = next_code_point(text, i);
    if (!is_line_end(c)) continue;
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.push_back(text.substr(begin, (keep_ends ? i : at) - begin));
    begin = i;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

void append_upper(std::string& out, char32_t c) { append_case(out, c, kUpper, kUpperSpecial); }

std::string to_upper(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) append_upper(out, next_code_point(text, i));
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  bool after_cased = false;
  for (size_t i = 0; i < text.size();) {
    char32_t c = next_code_point(text, i);
    bool last_of_word = c == 0x3a3 && after_cased;
    if (last_of_word) {
      size_t next = i;
      last_of_word = i >= text.size() || !is_alpha(next_code_point(text, next));
    }
    // Greek capital sigma at the end of a word has a form of its own.
    if (last_of_word)
      append_utf8(out, 0x3c2);
    else
      append_case(out, c, kLower, kLowerSpecial);
    after_cased = is_alpha(c);
  }
  return out;
}

std::string to_title(std::string_view text) {
  std::string out;
  bool in_word = false;
  for (size_t i = 0; i < text.size();) {
    char32_t c = next_code_point(text, i);
    if (in_word)
      append_case(out, c, kLower, kLowerSpecial);
    else
      append_case(out, c, kTitle, kTitleSpecial);
    in_word = is_cased(c);
  }
  return out;
}

std::string to_capitalized(std::string_view text) {
  std::string out;
  if (text.empty()) return out;
  size_t i = 0;
  append_case(out, next_code_point(text, i), kTitle, kTitleSpecial);
  return out + to_lower(text.substr(i));
}

std::string repr_string(std::string_view text) {
  char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    size_t begin = i;
    char32_t c = next_code_point(text, i);
    if (c == static_cast<unsigned char>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      out += text.substr(begin, i - begin);
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", static_cast<uint32_t>(c));
    } else if (c < 0x10000) {
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
    } else {
      out += fmt::format("\\U{:08x}", static_cast<uint32_t>(c));
    }
  }
  return out + quote;
}

std::string repr_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));  // [-]d[.ddd]e[+-]xx
  std::string sign;
  if (text.front() == '-') {
    sign = "-";
    text.remove_prefix(1);
  }
  size_t e = text.find('e');
  std::string digits(text.substr(0, 1));
  if (e > 2) digits += text.substr(2, e - 2);
  int exponent = 0;
  const char* from = text.data() + e + 1 + (text[e + 1] == '+' ? 1 : 0);
  std::from_chars(from, text.data() + text.size(), exponent);
  if (exponent < -4 || exponent >= 16) {
    std::string mantissa = digits.substr(0, 1);
    if (digits.size() > 1) mantissa += "." + digits.substr(1);
    return fmt::format("{}{}e{}{:02d}", sign, mantissa, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace millrace::jinja
