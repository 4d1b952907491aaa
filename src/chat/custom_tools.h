// Custom tools take text where functions take arguments. No model family has a form of its own for them, so
// to the model a custom tool is a function of one string, `input`, always held to that; to the client the
// string comes out as text while it is being written.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "chat/format.h"

namespace millrace::chat {

// What a custom tool's input looks like: a regular expression that all of it matches (empty: any text), and
// what the model is told of it.
struct CustomForm {
  std::string pattern = {}, told = {};
};
Tool custom_tool(std::string name, std::string description, const CustomForm& form);

// The arguments of a call with this input, as JSON text: what the model wrote, or would have.
std::string custom_arguments(std::string_view input);

// The input out of such arguments as they come.
class CustomInput {
 public:
  std::string add(std::string_view arguments);  // what becomes certain with these bytes

 private:
  void step(char c, std::string& out);
  void escape(char c, std::string& out);
  void unit(uint32_t unit, std::string& out);

  enum class State { kBegin, kKey, kValue, kEscape, kDigits, kDone, kRaw } state_ = State::kBegin;
  int quotes_ = 0;          // before the value: those around the key and the one that opens it
  int digits_ = 0;          // of \u, read
  uint32_t unit_ = 0;       // their value
  uint32_t surrogate_ = 0;  // the first half of a pair, waiting for the second
};

// The parser, with the calls of custom tools marked and their arguments as text. As it is where the
// conversation has no such tool.
std::unique_ptr<AnswerParser> read_custom_calls(std::unique_ptr<AnswerParser> parser,
                                                const Conversation& conversation);

}  // namespace millrace::chat
