#include "chat/harmony_parser.h"

#include <algorithm>

namespace millrace::chat {

void HarmonyParser::token(int32_t token, std::string_view text, std::vector<Delta>& out) {
  add_text(text, out);  // of this token, or what was held back before a control token
  using Place = HarmonyHeader::Place;
  if (token < 0) return;
  if (token == tokens_.start) {
    close(Place::kStart, out);
  } else if (token == tokens_.end || token == tokens_.ret || token == tokens_.call) {
    close(Place::kBetween, out);
  } else if (token == tokens_.channel) {
    if (in_message_ || !header_.begin_channel()) {
      close(Place::kBetween, out);
      header_.begin_channel();
    }
  } else if (token == tokens_.constrain) {
    if (!in_message_ && !header_.begin_type()) {
      open_message(out);
      emit(header_.text(), out);
    }
  } else if (token == tokens_.message) {
    if (in_message_) return;
    const bool whole = header_.end();
    open_message(out);
    if (!whole) emit(header_.text(), out);
  }
}

void HarmonyParser::finish(std::string_view text, std::vector<Delta>& out) {
  add_text(text, out);
  if (!in_message_) header_.abandon(true);
  close(HarmonyHeader::Place::kBetween, out);
}

void HarmonyParser::add_text(std::string_view text, std::vector<Delta>& out) {
  size_t used = 0;
  std::string refused;  // by the header; it may end within a character, whose rest is in `text`
  while (!in_message_ && used < text.size()) {
    if (header_.add(text[used++])) continue;
    open_message(out);
    refused = header_.text();
  }
  emit(refused.append(text.substr(used)), out);
}

void HarmonyParser::emit(std::string_view text, std::vector<Delta>& out) {
  if (text.empty()) return;
  Delta delta;
  delta.kind = kind_;
  delta.text = text;
  if (kind_ == Delta::Kind::kToolArguments) {
    delta.call = calls_ - 1;
  } else {
    // Two messages of one kind would run into each other.
    bool& earlier = kind_ == Delta::Kind::kReasoning ? has_reasoning_ : has_content_;
    if (earlier && !has_text_) delta.text.insert(0, "\n\n");
    earlier = true;
  }
  has_text_ = true;
  out.push_back(std::move(delta));
}

void HarmonyParser::open_message(std::vector<Delta>& out) {
  in_message_ = true;
  has_text_ = false;
  const std::string tool = header_.other_role() ? "" : called_tool(header_.recipient());
  if (!tool.empty()) {
    kind_ = Delta::Kind::kToolArguments;
    Delta delta;
    delta.kind = Delta::Kind::kToolCall;
    delta.call = calls_++;
    delta.name = tool;
    out.push_back(std::move(delta));
  } else if (header_.other_role() || header_.channel().compare(0, 6, "analys") == 0) {
    kind_ = Delta::Kind::kReasoning;
  } else {
    kind_ = Delta::Kind::kContent;
  }
}

void HarmonyParser::close(HarmonyHeader::Place next, std::vector<Delta>& out) {
  if (!in_message_) {
    header_.abandon(false);
    if (!header_.text().empty()) {
      open_message(out);
      emit(header_.text(), out);
    }
  }
  // A call without arguments is one with none of them.
  if (in_message_ && kind_ == Delta::Kind::kToolArguments && !has_text_) emit("{}", out);
  in_message_ = false;
  header_ = HarmonyHeader(next);
}

std::string HarmonyParser::called_tool(const std::string& recipient) const {
  if (tools_.empty() || recipient.empty()) return "";
  const std::string prefix = "functions.";
  if (recipient.size() > prefix.size() && recipient.compare(0, prefix.size(), prefix) == 0) {
    return recipient.substr(prefix.size());
  }
  const auto is_offered = [&](const std::string& name) {
    return std::find(tools_.begin(), tools_.end(), name) != tools_.end();
  };
  if (is_offered(recipient)) return recipient;
  const std::string last = recipient.substr(recipient.rfind('.') + 1);
  return is_offered(last) ? last : "";
}

}  // namespace millrace::chat
