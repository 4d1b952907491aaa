// Reads the answers of Gemma 4: text, with thinking in <|channel>thought .. <channel|>, and calls as
// <|tool_call>call:NAME{key:value,..}<tool_call|>, whose strings stand between two <|"|>. Arguments become
// JSON, and come out when their call is complete. What looked like a call and is none is text after all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/template_answer_parser.h"

namespace millrace::chat {

class GemmaAnswerParser : public AnswerParser {
 public:
  explicit GemmaAnswerParser(TemplateAnswer answer) : answer_(std::move(answer)) {}

  void token(int32_t token, std::string_view text, std::vector<Delta>& out) override;
  void finish(std::string_view text, std::vector<Delta>& out) override;

 private:
  enum class State { kContent, kChannel, kReasoning, kCall };

  void read(bool last, std::vector<Delta>& out);
  bool step(bool last, std::vector<Delta>& out);
  bool in_text(bool last, std::vector<Delta>& out);
  bool in_call(bool last, std::vector<Delta>& out);
  void put(Delta::Kind kind, std::string_view text, std::vector<Delta>& out);

  TemplateAnswer answer_;
  State state_ = State::kContent;
  std::string input_;  // not read yet
  std::string space_;  // of reasoning: white space that comes out with the text behind it
  int32_t calls_ = 0;
  size_t first_ = 0;  // deltas before this one are the caller's
};

// The arguments of a call, "{city:<|\"|>Oslo<|\"|>,days:3}" or the same as JSON, as JSON; nothing: they are
// neither.
std::optional<std::string> gemma_arguments(std::string_view text);

}  // namespace millrace::chat
