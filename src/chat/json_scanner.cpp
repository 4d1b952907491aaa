#include "chat/json_scanner.h"

#include <nlohmann/json.hpp>

namespace millrace::chat {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// The text of a JSON string, or nothing when it is no string.
bool unquote(const std::string& raw, std::string& out) {
  const nlohmann::json value = nlohmann::json::parse(raw, nullptr, false);
  if (!value.is_string()) return false;
  out = value.get<std::string>();
  return true;
}

}  // namespace

JsonScanner::State JsonScanner::push(char c) {
  if (state_ == State::kBad) return state_;
  if (!step(c)) {
    state_ = State::kBad;
  } else if (expects_ == Expects::kNothing) {
    state_ = State::kDone;
  }
  return state_;
}

bool JsonScanner::step(char c) {
  if (expects_ == Expects::kString) return in_string(c);
  if (expects_ == Expects::kNumber) {
    if (in_number(c)) return true;
    const bool whole = number_ == Number::kZero || number_ == Number::kDigits ||
                       number_ == Number::kFraction || number_ == Number::kExponentDigits;
    if (!whole || open_.empty()) return false;
    end_value();
  }
  if (expects_ == Expects::kWord) {
    if (word_.empty() || word_[0] != c) return false;
    word_.remove_prefix(1);
    if (word_.empty()) end_value();
    return true;
  }
  if (is_space(c)) return true;
  switch (expects_) {
    case Expects::kValueOrEnd:
      if (c == ']') break;
      return begin_value(c);
    case Expects::kValue:
      return begin_value(c);
    case Expects::kKeyOrEnd:
      if (c == '}') break;
      [[fallthrough]];
    case Expects::kKey:
      if (c != '"') return false;
      expects_ = Expects::kString;
      in_key_ = true;
      return true;
    case Expects::kColon:
      expects_ = Expects::kValue;
      return c == ':';
    case Expects::kCommaOrEnd:
      if (c == ',') {
        expects_ = open_.back() == '{' ? Expects::kKey : Expects::kValue;
        return true;
      }
      if (c != (open_.back() == '{' ? '}' : ']')) return false;
      break;
    default:
      return false;
  }
  open_.pop_back();
  end_value();
  return true;
}

bool JsonScanner::begin_value(char c) {
  if (c == '{' || c == '[') {
    open_ += c;
    expects_ = c == '{' ? Expects::kKeyOrEnd : Expects::kValueOrEnd;
  } else if (c == '"') {
    expects_ = Expects::kString;
  } else if (c == '-' || is_digit(c)) {
    expects_ = Expects::kNumber;
    number_ = c == '-' ? Number::kSign : c == '0' ? Number::kZero : Number::kDigits;
  } else {
    for (const std::string_view word : {"true", "false", "null"}) {
      if (word[0] != c) continue;
      expects_ = Expects::kWord;
      word_ = word.substr(1);
      return true;
    }
    return false;
  }
  return true;
}

bool JsonScanner::in_string(char c) {
  if (escape_ > 1) {
    escape_ = escape_ == 5 ? 0 : escape_ + 1;
    return is_hex(c);
  }
  if (escape_ == 1) {
    escape_ = c == 'u' ? 2 : 0;
    return std::string_view("\"\\/bfnrtu").find(c) != std::string_view::npos;
  }
  if (c == '\\') {
    escape_ = 1;
  } else if (c == '"') {
    if (in_key_) {
      in_key_ = false;
      expects_ = Expects::kColon;
    } else {
      end_value();
    }
  }
  return static_cast<unsigned char>(c) >= 0x20;
}

bool JsonScanner::in_number(char c) {
  const bool e = c == 'e' || c == 'E';
  switch (number_) {
    case Number::kSign:
      number_ = c == '0' ? Number::kZero : Number::kDigits;
      return is_digit(c);
    case Number::kZero:
    case Number::kDigits:
      if (number_ == Number::kDigits && is_digit(c)) return true;
      if (c == '.') number_ = Number::kPoint;
      if (e) number_ = Number::kExponent;
      return c == '.' || e;
    case Number::kPoint:
    case Number::kFraction:
      if (is_digit(c)) {
        number_ = Number::kFraction;
        return true;
      }
      if (number_ == Number::kFraction && e) {
        number_ = Number::kExponent;
        return true;
      }
      return false;
    case Number::kExponent:
      if (c == '+' || c == '-') {
        number_ = Number::kExponentSign;
        return true;
      }
      [[fallthrough]];
    case Number::kExponentSign:
    case Number::kExponentDigits:
      if (!is_digit(c)) return false;
      number_ = Number::kExponentDigits;
      return true;
  }
  return false;
}

void JsonScanner::end_value() { expects_ = open_.empty() ? Expects::kNothing : Expects::kCommaOrEnd; }

// ---------------------------------------------------------------- calls

JsonScanner::State CallScanner::push(char c) {
  using State = JsonScanner::State;
  if (state_ != State::kMore) return state_;
  last_ = c;
  if (!started_ && !is_space(c)) {
    if (c != '{') return state_ = State::kBad;
    started_ = true;
  }
  const bool was_key = json_.in_key();
  const size_t was_depth = json_.depth();
  const bool value_next = json_.depth() == 1 && json_.expects_value();
  const bool was_scalar = json_.in_scalar();
  state_ = json_.push(c);
  if (state_ == State::kBad) return state_;
  if (in_value_) {
    // A number or word ends with the byte behind it; a string, an object or an array with its own last byte.
    const bool outside = json_.depth() <= 1 && !json_.in_scalar();
    const bool behind =
        was_depth == 1 && was_scalar && !json_.in_scalar() && (c == ',' || c == '}' || is_space(c));
    if (!behind) {
      value_ += c;
      if (member_ == Member::kArguments && value_[0] != '"') arguments_ += c;
    }
    if (outside) finish_member();
  } else if (value_next && !is_space(c)) {
    in_value_ = true;
    value_ = c;
    std::string name;
    if (!unquote(key_, name)) name.clear();
    member_ = name == "name"                                                      ? Member::kName
              : (name == "arguments" || name == "parameters") && !seen_arguments_ ? Member::kArguments
                                                                                  : Member::kOther;
    if (member_ == Member::kArguments && c != '"') arguments_ += c;
  } else if (json_.depth() == 1 && (json_.in_key() || was_key)) {
    if (!was_key) key_.clear();
    key_ += c;
  }
  // A call is an object with a name.
  if (state_ == State::kDone && !has_name_) state_ = State::kBad;
  return state_;
}

void CallScanner::finish_member() {
  in_value_ = false;
  if (member_ == Member::kName && !has_name_) {
    has_name_ = unquote(value_, name_) && !name_.empty();
    if (!has_name_) state_ = JsonScanner::State::kBad;
  } else if (member_ == Member::kArguments) {
    seen_arguments_ = true;
    // Some models write the arguments as a string that holds JSON.
    std::string inner;
    if (value_[0] == '"' && unquote(value_, inner)) arguments_ += inner;
  }
  value_.clear();
}

std::string CallScanner::take_arguments() {
  std::string out;
  if (has_name_) out.swap(arguments_);
  return out;
}

}  // namespace millrace::chat
