// Reads the answers of models that follow a chat template: text, with thinking between <think> and </think>
// and calls in the way of their family.
//
//   hermes   <tool_call>{"name": .., "arguments": {..}}</tool_call>, any number of times: Qwen, SmolLM;
//            or between other marks, where the template has them
//   llama3   the answer is {"name": .., "parameters": {..}}, perhaps behind <|python_tag|>
//   mistral  [TOOL_CALLS][{"name": .., "arguments": {..}}, ..] or [TOOL_CALLS]NAME[ARGS]{..}
//   shaped   as the model's template spells them (call_shape.h)
//   plain    text alone
//
// A call's name goes out when it is known and its arguments as they come, byte for byte. What looked like a
// call and is none is text after all.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/json_scanner.h"
#include "chat/shape_scanner.h"

namespace millrace::chat {

enum class Family { kPlain, kHermes, kLlama3, kMistral, kShaped, kGemma };  // kGemma: gemma_answer_parser.h

struct TemplateAnswer {
  Family family = Family::kPlain;
  std::vector<std::string> tools = {};  // that may be called; none: no text becomes a call
  bool thinking = false;                // the prompt has opened <think>
  // Control tokens that mean something here, with their names: the engine gives them no text.
  std::map<int32_t, std::string> names = {};
  CallShape shape = {};     // of kShaped, and of kHermes where the marks are others than <tool_call>
  StringKeys strings = {};  // of the tools
};

class TemplateAnswerParser : public AnswerParser {
 public:
  explicit TemplateAnswerParser(TemplateAnswer answer);

  void token(int32_t token, std::string_view text, std::vector<Delta>& out) override;
  void finish(std::string_view text, std::vector<Delta>& out) override;

 private:
  enum class State {
    kBegin,  // nothing but white space yet
    kReasoning,
    kContent,
    kCalls,      // behind a marker: a call, a list of them, or a name
    kCall,       // in a call's object
    kArguments,  // in the arguments behind a name
    kAfterCall,  // another call, or the end of them
  };

  void add(std::string_view text, std::vector<Delta>& out);
  void step(char c, std::vector<Delta>& out);
  void begin(std::vector<Delta>& out);
  void text(std::vector<Delta>& out);
  void calls(char c, std::vector<Delta>& out);
  void named_call(char c, std::vector<Delta>& out);
  void call(char c, std::vector<Delta>& out);
  void arguments(char c, std::vector<Delta>& out);
  void after_call(char c);
  bool after_shaped_call(std::string_view text);

  void begin_calls(State otherwise, const std::string& marker);
  void not_a_call(std::vector<Delta>& out);
  void end_calls();
  void open_call(const std::string& name, std::vector<Delta>& out);
  void enter_text(State state);
  void put_text(std::string_view text, std::vector<Delta>& out);
  void put(Delta::Kind kind, std::string_view text, std::vector<Delta>& out);
  void read_again(const std::string& text);

  TemplateAnswer answer_;
  std::vector<CallShape::Opener> openers_;  // what begins calls; none: nothing does
  std::string close_marker_;                // behind calls; empty: none
  State state_ = State::kBegin;
  State otherwise_ = State::kContent;  // where the text goes if this is no call
  std::string marker_;                 // that began the calls
  std::string held_;   // of text: could be the start of a marker. Of a call: what it becomes if it is none
  std::string space_;  // white space that comes out with the text behind it
  bool skip_space_ = false;
  bool in_list_ = false, is_open_ = false, has_arguments_ = false;
  std::unique_ptr<CallReader> scanner_;
  JsonScanner json_;
  int32_t calls_ = 0;
  std::string input_;  // not read yet, from at_ on
  size_t at_ = 0;
  size_t first_ = 0;  // deltas before this one are the caller's
};

}  // namespace millrace::chat
