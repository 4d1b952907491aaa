// Reads a harmony answer token by token. Any sequence of tokens is an answer: where it leaves the form, the
// text goes to the nearest sensible channel.
//
//   header   behind <|start|> or <|channel|>, up to <|message|>: see harmony_header.h
//   content  up to <|end|>, <|return|>, <|call|>, or a <|start|> or <|channel|> that came without them
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/harmony_header.h"
#include "chat/harmony_tokens.h"

namespace millrace::chat {

class HarmonyParser : public AnswerParser {
 public:
  // `tools`: names that may be called; with none of them no text becomes a call.
  HarmonyParser(const HarmonyTokens& tokens, std::vector<std::string> tools)
      : tokens_(tokens), tools_(std::move(tools)) {}

  void token(int32_t token, std::string_view text, std::vector<Delta>& out) override;
  void finish(std::string_view text, std::vector<Delta>& out) override;

 private:
  void add_text(std::string_view text, std::vector<Delta>& out);
  void emit(std::string_view text, std::vector<Delta>& out);
  // The header is whole, or its text was none: content follows.
  void open_message(std::vector<Delta>& out);
  // The message ends, or a header without one: its text is content.
  void close(HarmonyHeader::Place next, std::vector<Delta>& out);
  std::string called_tool(const std::string& recipient) const;  // empty: no tool of the client's

  HarmonyTokens tokens_;
  std::vector<std::string> tools_;
  HarmonyHeader header_{HarmonyHeader::Place::kPrompt};
  bool in_message_ = false;
  Delta::Kind kind_ = Delta::Kind::kContent;          // of the message being read
  bool has_text_ = false;                             // this message gave some
  bool has_reasoning_ = false, has_content_ = false;  // earlier messages did
  int32_t calls_ = 0;
};

}  // namespace millrace::chat
