// JSON as it comes, byte by byte. JsonScanner knows after every byte whether the text can still become one
// value and where in it we are; CallScanner reads a call, {"name": .., "arguments": ..}, with it and hands
// the arguments on, byte for byte, as they come.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace millrace::chat {

inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}
// Of a tool's name.
inline bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == '.';
}

class JsonScanner {
 public:
  enum class State {
    kMore,  // can become a value
    kDone,  // is one; white space may follow
    kBad,   // no value begins like this
  };
  // A number at the top is never kDone: it could go on.
  State push(char c);
  State state() const { return state_; }

  size_t depth() const { return open_.size(); }  // of arrays and objects around the next byte
  bool expects_value() const { return expects_ == Expects::kValue || expects_ == Expects::kValueOrEnd; }
  bool in_key() const { return in_key_; }  // the string being read is a key
  bool in_scalar() const {
    return expects_ == Expects::kString || expects_ == Expects::kNumber || expects_ == Expects::kWord;
  }

 private:
  enum class Expects {
    kValue,
    kValueOrEnd,
    kKey,
    kKeyOrEnd,
    kColon,
    kCommaOrEnd,
    kString,
    kNumber,
    kWord,
    kNothing
  };
  bool step(char c);
  bool begin_value(char c);
  bool in_string(char c);
  bool in_number(char c);
  void end_value();

  State state_ = State::kMore;
  Expects expects_ = Expects::kValue;
  std::string open_;  // the brackets around us
  bool in_key_ = false;
  int escape_ = 0;         // in a string: 1 behind a backslash, 2..5 before the last four digits of \u
  std::string_view word_;  // what is left of true, false, null
  enum class Number { kSign, kZero, kDigits, kPoint, kFraction, kExponent, kExponentSign, kExponentDigits };
  Number number_ = Number::kSign;
};

// Reads one call as it comes, byte by byte.
class CallReader {
 public:
  virtual ~CallReader() = default;
  // kDone with the call's last byte; kBad: this is no call, or no longer one.
  virtual JsonScanner::State push(char c) = 0;
  virtual bool has_name() const = 0;  // known, and nothing but a call begins like this
  virtual const std::string& name() const = 0;
  // Bytes of the arguments since the last call, as JSON. Nothing before the name is known.
  virtual std::string take_arguments() = 0;
  virtual std::string unread() const = 0;  // behind kBad: what was pushed and is not the call's
};

class CallScanner : public CallReader {
 public:
  JsonScanner::State push(char c) override;
  bool has_name() const override { return has_name_; }
  const std::string& name() const override { return name_; }
  std::string take_arguments() override;
  std::string unread() const override { return std::string(1, last_); }

 private:
  void finish_member();

  JsonScanner json_;
  JsonScanner::State state_ = JsonScanner::State::kMore;
  std::string key_, value_;  // raw JSON, of the member being read
  bool started_ = false, in_value_ = false;
  enum class Member { kOther, kName, kArguments } member_ = Member::kOther;
  bool has_name_ = false, seen_arguments_ = false;
  char last_ = 0;
  std::string name_, arguments_;
};

}  // namespace millrace::chat
