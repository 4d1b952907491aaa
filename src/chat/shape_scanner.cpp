#include "chat/shape_scanner.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "chat/call_values.h"

namespace millrace::chat {
namespace {

constexpr size_t kMaxName = 256;

// Up to the first white space.
std::string first_part(std::string_view text) {
  text = trimmed(text);
  return std::string(text.substr(0, text.find_first_of(" \n\r\t")));
}

}  // namespace

ShapeScanner::ShapeScanner(const CallShape& shape, const StringKeys& strings, std::string rest)
    : shape_(shape),
      strings_(strings),
      rest_(std::move(rest)),
      end_(first_part(shape.kind == CallShape::Kind::kPython ? "" : shape.end)),
      value_end_(trimmed(shape.value_end)) {
  if (trimmed(rest_).empty()) stage_ = Stage::kName;
}

std::string ShapeScanner::take_arguments() {
  return has_name_ ? std::exchange(arguments_, std::string()) : std::string();
}

JsonScanner::State ShapeScanner::push(char c) {
  const bool in_mark = stage_ == Stage::kRest || stage_ == Stage::kNameEnd || stage_ == Stage::kBody ||
                       stage_ == Stage::kKeyEnd || stage_ == Stage::kEnd;
  // White space before a mark is not kept, however much of it comes.
  if (in_mark && is_space(c) && trimmed(held_).empty()) {
    held_.clear();
    return JsonScanner::State::kMore;
  }
  held_ += c;
  if (!step(c)) return JsonScanner::State::kBad;
  return is_done_ ? JsonScanner::State::kDone : JsonScanner::State::kMore;
}

void ShapeScanner::enter(Stage stage) {
  stage_ = stage;
  held_.clear();
}

bool ShapeScanner::step(char c) {
  switch (stage_) {
    case Stage::kRest: {
      const Match match = match_mark(held_, rest_);
      if (match == Match::kWhole) enter(Stage::kName);
      return match != Match::kNo;
    }
    case Stage::kName:
      if (is_name_char(c)) {
        name_ += c;
        return name_.size() <= kMaxName;
      }
      if (name_.empty()) return is_space(c);
      stage_ = Stage::kNameEnd;
      held_ = c;
      return name_end();
    case Stage::kNameEnd:
      return name_end();
    case Stage::kBody:
      return body();
    case Stage::kKey:
      if (c != trimmed(shape_.key_end)[0]) {
        key_ += c;
        return true;
      }
      stage_ = Stage::kKeyEnd;
      held_ = c;
      [[fallthrough]];
    case Stage::kKeyEnd: {
      const Match match = match_mark(held_, shape_.key_end, &any_);
      if (match == Match::kWhole) enter(Stage::kValue);
      return match != Match::kNo;
    }
    case Stage::kValue:
      return value();
    case Stage::kJson:
      arguments_ += c;
      if (json_.push(c) == JsonScanner::State::kBad) return false;
      return json_.state() != JsonScanner::State::kDone || end_arguments("");
    case Stage::kPython:
      return python(c);
    case Stage::kEnd: {
      const Match match = match_mark(held_, end_);
      is_done_ = match == Match::kWhole;
      return match != Match::kNo;
    }
  }
  return false;
}

bool ShapeScanner::name_end() {
  if (trimmed(shape_.name_end).empty()) {
    stage_ = Stage::kBody;
    return body();
  }
  const Match match = match_mark(held_, shape_.name_end);
  if (match != Match::kWhole) return match == Match::kPartly;
  enter(shape_.kind == CallShape::Kind::kPython ? Stage::kPython : Stage::kBody);
  return true;
}

// The next key, JSON in place of all of them, or the end.
bool ShapeScanner::body() {
  const std::string_view text = trimmed(held_);
  if (text.empty()) return true;  // what ended the name
  if (text == "{" && !has_members_) {
    has_name_ = true;
    stage_ = Stage::kJson;
    arguments_ = "{";
    held_.clear();
    json_.push('{');
    return true;
  }
  const Match key =
      shape_.kind == CallShape::Kind::kTagged ? match_mark(held_, shape_.key_begin) : Match::kNo;
  if (key == Match::kWhole) {
    has_name_ = true;
    key_.clear();
    enter(Stage::kKey);
    return true;
  }
  const Match end = end_.empty() ? Match::kNo : match_mark(held_, end_);
  if (end == Match::kWhole) {
    has_name_ = true;
    arguments_ += has_members_ ? "}" : "{}";
    is_done_ = true;
  }
  return key == Match::kPartly || end != Match::kNo;
}

bool ShapeScanner::value() {
  if (!held_.ends_with(value_end_)) return true;
  std::string_view text = std::string_view(held_).substr(0, held_.size() - value_end_.size());
  // A line break on either side belongs to the tags, in templates that write one and in models that do
  // anyway.
  if (text.starts_with('\n')) text.remove_prefix(1);
  if (text.ends_with('\n')) text.remove_suffix(1);
  constexpr std::string_view kLiteral = "<![CDATA[", kLiteralEnd = "]]>";  // XML's own
  const bool is_quoted = text.starts_with(kLiteral) && text.ends_with(kLiteralEnd);
  if (is_quoted) text = text.substr(kLiteral.size(), text.size() - kLiteral.size() - kLiteralEnd.size());
  const std::string key(trimmed(key_));
  std::optional<bool> is_string;
  if (is_quoted) {
    is_string = true;
  } else if (!shape_.any_of_string.empty()) {
    is_string = any_ == shape_.any_of_string;
  } else if (const auto tool = strings_.find(name_); tool != strings_.end()) {
    if (const auto found = tool->second.find(key); found != tool->second.end()) is_string = found->second;
  }
  arguments_ += (has_members_ ? ", " : "{") + json_string(key) + ": " + tagged_value(text, is_string);
  has_members_ = true;
  enter(Stage::kBody);
  return true;
}

bool ShapeScanner::python(char c) {
  if (quote_ != 0) {
    if (!escaped_ && c == quote_) quote_ = 0;
    escaped_ = !escaped_ && c == '\\';
    return true;
  }
  if (c == '"' || c == '\'') quote_ = c;
  if (c == '(' || c == '[' || c == '{') ++depth_;
  if (c != ')' && c != ']' && c != '}') return true;
  if (depth_-- > 0) return true;
  if (c != ')') return false;
  held_.pop_back();
  const std::string_view text = trimmed(held_);
  const bool json = text.starts_with('{') && nlohmann::json::accept(text);
  const std::optional<std::string> arguments = json ? std::string(text) : python_arguments(text);
  has_name_ = arguments.has_value();
  return arguments && end_arguments(*arguments);
}

bool ShapeScanner::end_arguments(std::string_view arguments) {
  arguments_ += arguments;  // before they go with held_, which they may be a part of
  enter(Stage::kEnd);
  is_done_ = end_.empty();
  return true;
}

}  // namespace millrace::chat
