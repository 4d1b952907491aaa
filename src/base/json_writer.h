// JsonWriter: JSON appended to a string as it is said, without a tree and without copies: a token of an event
// stream is a few appends. Commas and escapes are the writer's, braces and brackets the caller's to close.
// Text may be any bytes: what is no UTF-8 becomes U+FFFD, as valid_utf8 (base/utf8.h) does it.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace millrace {

class JsonWriter {
 public:
  explicit JsonWriter(std::string& out) : out_(out) {}
  // Goes on with `list`, the elements of an array without its brackets: a comma first unless it is empty.
  static JsonWriter continuing(std::string& list) { return JsonWriter(list, !list.empty()); }

  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);

  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(std::nullptr_t) { return raw("null"); }
  JsonWriter& value(std::same_as<bool> auto truth) { return raw(truth ? "true" : "false"); }
  JsonWriter& value(std::signed_integral auto number) { return integer(static_cast<int64_t>(number)); }
  JsonWriter& value(std::unsigned_integral auto number) requires(!std::same_as<decltype(number), bool>) {
    return integer(static_cast<uint64_t>(number));
  }
  // The fewest digits that read back the same; null for what JSON has no number for.
  JsonWriter& value(float number);
  JsonWriter& value(double number);

  template <typename T>
  JsonWriter& field(std::string_view name, const T& content) {
    return key(name).value(content);
  }
  // The text, or null when there is none.
  JsonWriter& text_or_null(std::string_view name, std::string_view text) {
    return text.empty() ? field(name, nullptr) : field(name, text);
  }
  // What is JSON already: a value, or elements or members with the commas between them. Nothing when empty.
  JsonWriter& raw(std::string_view json);

 private:
  JsonWriter(std::string& out, bool after_value) : out_(out), after_value_(after_value) {}
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  JsonWriter& integer(int64_t number);
  JsonWriter& integer(uint64_t number);
  void separate() {
    if (after_value_) out_.push_back(',');
  }

  std::string& out_;
  bool after_value_ = false;  // what comes next in this object or array needs a comma
};

// One string with its quotes.
std::string json_string(std::string_view text);

}  // namespace millrace
