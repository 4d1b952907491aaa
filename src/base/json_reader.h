// JsonReader: JSON as events, for a handler with the functions of nlohmann's json_sax. It takes nothing but
// the standard's JSON and says nothing of what is wrong with the rest: whoever wants to know asks nlohmann's
// own parser, which looks at every character in four places and takes five times as long.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/utf8.h"

namespace millrace {

template <class Handler>
class JsonReader {
 public:
  JsonReader(std::string_view text, Handler& handler)
      : at_(text.data()), end_(text.data() + text.size()), handler_(handler) {}

  // False: this is no JSON, or nothing that is read here.
  bool read() {
    if (!value()) return false;
    while (!open_.empty()) {
      skip_space();
      const bool in_object = open_.back() == '}';
      if (take(open_.back())) {
        if (!close(in_object)) return false;
      } else if (!take(',') || (in_object && !key()) || !value()) {
        return false;
      }
    }
    skip_space();
    return at_ == end_;
  }

 private:
  bool take(char c) {
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view word) {
    if (!std::string_view(at_, static_cast<size_t>(end_ - at_)).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  void skip_space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }
  bool close(bool object) {
    open_.pop_back();
    return object ? handler_.end_object() : handler_.end_array();
  }

  bool key() {
    skip_space();
    if (!take('"') || !string() || !handler_.key(text_)) return false;
    skip_space();
    return take(':');
  }

  // One value; of an object or array its first member or item, which may be of that kind again.
  bool value() {
    while (true) {
      skip_space();
      if (at_ == end_) return false;
      if (take('{')) {
        open_.push_back('}');
        if (!handler_.start_object(static_cast<size_t>(-1))) return false;
        skip_space();
        if (take('}')) return close(true);
        if (!key()) return false;
      } else if (take('[')) {
        open_.push_back(']');
        if (!handler_.start_array(static_cast<size_t>(-1))) return false;
        skip_space();
        if (take(']')) return close(false);
      } else {
        return scalar();
      }
    }
  }

  bool scalar() {
    switch (*at_) {
      case '"':
        ++at_;
        return string() && handler_.string(text_);
      case 't':
        return take("true") && handler_.boolean(true);
      case 'f':
        return take("false") && handler_.boolean(false);
      case 'n':
        return take("null") && handler_.null();
      default:
        return number();
    }
  }

  bool digits() {
    const char* const begin = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ > begin;
  }

  bool number() {
    const char* const begin = at_;
    const bool negative = take('-');
    if (!take('0') && !digits()) return false;
    bool integer = true;
    if (take('.')) {
      integer = false;
      if (!digits()) return false;
    }
    if (take('e') || take('E')) {
      integer = false;
      if (!take('-')) take('+');
      if (!digits()) return false;
    }
    int64_t i = 0;
    uint64_t u = 0;
    // What does not fit an integer is a double.
    if (integer && negative && std::from_chars(begin, at_, i).ec == std::errc())
      return handler_.number_integer(i);
    if (integer && !negative && std::from_chars(begin, at_, u).ec == std::errc())
      return handler_.number_unsigned(u);
    double d = 0;
    return std::from_chars(begin, at_, d).ec == std::errc() && handler_.number_float(d, text_);
  }

  // Behind its first quote, into text_.
  bool string() {
    text_.clear();
    while (at_ < end_) {
      const char* const begin = at_;
      while (at_ < end_ && kPlain[static_cast<uint8_t>(*at_)]) ++at_;
      text_.append(begin, at_);
      if (at_ == end_) return false;
      if (take('"')) return true;
      if (take('\\')) {
        if (!escape()) return false;
        continue;
      }
      const size_t length = utf8_sequence_length({at_, static_cast<size_t>(end_ - at_)});
      if (length < 2) return false;  // ill-formed, or a control character
      text_.append(at_, length);
      at_ += length;
    }
    return false;
  }

  bool escape() {
    constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
    if (at_ == end_) return false;
    const char name = *at_++;
    if (const size_t known = kNames.find(name); known != std::string_view::npos) {
      text_ += kValues[known];
      return true;
    }
    uint32_t c = 0, low = 0;
    if (name != 'u' || !hex(c)) return false;
    if (c >= 0xd800 && c < 0xdc00) {
      if (!take("\\u") || !hex(low) || low < 0xdc00 || low >= 0xe000) return false;
      c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    } else if (c >= 0xdc00 && c < 0xe000) {
      return false;
    }
    append_utf8(text_, c);
    return true;
  }

  bool hex(uint32_t& c) {
    if (end_ - at_ < 4) return false;
    const auto [behind, error] = std::from_chars(at_, at_ + 4, c, 16);
    if (error != std::errc() || behind != at_ + 4 || *at_ == '-') return false;
    at_ += 4;
    return true;
  }

  // What stands for itself in a string, and is one byte.
  static constexpr std::array<bool, 256> kPlain = [] {
    std::array<bool, 256> plain{};
    for (size_t c = 0x20; c < 0x80; ++c) plain[c] = c != '"' && c != '\\';
    return plain;
  }();

  const char* at_;
  const char* const end_;
  Handler& handler_;
  std::vector<char> open_;  // what closes each object and array that is open
  std::string text_;
};

}  // namespace millrace
