// ChatReader: one choice of a chat's answer while it is read: the format's parser, and what it has found so
// far.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chat/format.h"
#include "engine/stop_matcher.h"
#include "millrace/engine.h"

namespace millrace::server {

struct ReadCall {
  std::string id, name, arguments;  // arguments: of a custom tool its input
  bool custom = false;
};

class ChatReader {
 public:
  // `stop`: strings before which the content ends. The engine knows only the whole text, where they would cut
  // thinking and arguments too.
  ChatReader(const Engine& engine, std::unique_ptr<chat::AnswerParser> parser, bool logprobs,
             std::vector<std::string> stop)
      : engine_(&engine), parser_(std::move(parser)), logprobs_(logprobs), stops_(std::move(stop)) {}

  // What an event adds, in order; valid until the next call. A call that begins has its id in calls().
  const std::vector<chat::Delta>& take(const Event& event);
  // Logprob objects, joined by commas, of the content tokens since the last call.
  std::string take_logprobs();

  const std::string& content() const { return content_; }
  const std::string& reasoning() const { return reasoning_; }
  const std::vector<ReadCall>& calls() const { return calls_; }
  int64_t reasoning_tokens() const { return reasoning_tokens_; }
  bool finished() const { return !finish_.empty(); }
  bool stopped() const { return stops_.stopped(); }  // by a string: what still comes is dropped
  const std::string& stop_found() const { return stops_.found(); }  // that string; empty: none
  // stop, length or tool_calls; empty while it runs.
  std::string finish() const { return finish_ == "stop" && !calls_.empty() ? "tool_calls" : finish_; }

 private:
  void apply_stops(bool last);

  const Engine* engine_;
  std::unique_ptr<chat::AnswerParser> parser_;
  bool logprobs_;
  StopMatcher stops_;
  std::vector<chat::Delta> deltas_;
  std::string content_, reasoning_, finish_;
  std::vector<ReadCall> calls_;
  int64_t reasoning_tokens_ = 0;
  std::string ready_logprobs_;    // logprob objects, joined by commas
  std::string pending_logprobs_;  // ... of tokens whose text is not certain yet
};

}  // namespace millrace::server
