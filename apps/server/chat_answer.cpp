#include "chat_answer.h"

#include "generation.h"
#include "ids.h"
#include "logprobs.h"

namespace millrace::server {

// Cuts the content where a string to stop at begins, and holds back what may be the beginning of one.
void ChatReader::apply_stops(bool last) {
  for (size_t i = 0; i < deltas_.size(); ++i) {
    if (deltas_[i].kind != chat::Delta::Kind::kContent) continue;
    deltas_[i].text = stops_.push(deltas_[i].text);
    if (!stops_.stopped()) continue;
    deltas_.resize(i + 1);
    finish_ = "stop";
  }
  if (last && !stops_.stopped()) {
    std::string held = stops_.finish();
    if (!held.empty()) deltas_.push_back({.kind = chat::Delta::Kind::kContent, .text = std::move(held)});
  }
  std::erase_if(deltas_, [](const chat::Delta& delta) {
    return delta.kind == chat::Delta::Kind::kContent && delta.text.empty();
  });
}

const std::vector<chat::Delta>& ChatReader::take(const Event& event) {
  deltas_.clear();
  if (stopped()) return deltas_;
  if (event.kind == Event::Kind::kToken) {
    parser_->token(event.token, event.text, deltas_);
    if (logprobs_ && !engine_->is_special(event.token)) {
      JsonWriter json = JsonWriter::continuing(pending_logprobs_);
      write_token_logprob(json, *engine_, event);
    }
  } else {
    parser_->finish(event.text, deltas_);
    finish_ = finish_name(event.finish);
  }
  apply_stops(event.kind != Event::Kind::kToken);
  bool content = false, other = false;
  for (const chat::Delta& delta : deltas_) {
    switch (delta.kind) {
      case chat::Delta::Kind::kReasoning:
        reasoning_ += delta.text;
        other = true;
        break;
      case chat::Delta::Kind::kContent:
        content_ += delta.text;
        content = true;
        break;
      case chat::Delta::Kind::kToolCall:
        calls_.push_back(
            {.id = new_id("call_", 24), .name = delta.name, .arguments = {}, .custom = delta.custom});
        other = true;
        break;
      case chat::Delta::Kind::kToolArguments:
        calls_[static_cast<size_t>(delta.call)].arguments += delta.text;
        other = true;
        break;
    }
    if (delta.kind == chat::Delta::Kind::kReasoning) ++reasoning_tokens_;
  }
  // A token's logprob belongs where its text went; text may be late by some tokens.
  if (content) JsonWriter::continuing(ready_logprobs_).raw(pending_logprobs_);
  if (content || other) pending_logprobs_.clear();
  return deltas_;
}

std::string ChatReader::take_logprobs() { return std::exchange(ready_logprobs_, {}); }

}  // namespace millrace::server
