// Constraints: what a request says its answer must look like, compiled once and kept for the next request
// that says the same.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "chat/format.h"
#include "grammar/grammar.h"
#include "json_text.h"
#include "millrace/engine.h"

namespace millrace::server {

class Constraints {
 public:
  explicit Constraints(const Engine& engine) : engine_(engine) {}

  // response_format, grammar or regex of a plain completion; null when there is none.
  std::shared_ptr<const TokenConstraint> of_request(const Fields& fields);
  // The same for a chat, together with tool_choice and strict tools: the format knows where each applies.
  std::shared_ptr<const TokenConstraint> of_chat(const Fields& fields, const chat::Format& format,
                                                 const chat::Conversation& conversation);
  // text.format of the responses API: {"type", "schema", ...}.
  std::shared_ptr<const grammar::Grammar> of_text_format(const Fields& format);

 private:
  std::shared_ptr<const grammar::Grammar> grammar_of(const Fields& fields);
  std::shared_ptr<const grammar::Grammar> compiled(const std::string& path, char kind,
                                                   const std::string& source);
  std::shared_ptr<const grammar::Vocabulary> vocabulary();

  const Engine& engine_;
  std::mutex mutex_;
  std::shared_ptr<const grammar::Vocabulary> vocabulary_;  // made when first wanted
  using Item = std::pair<std::string, std::shared_ptr<const grammar::Grammar>>;
  std::list<Item> recent_;  // the last used first
  std::unordered_map<std::string, std::list<Item>::iterator> by_source_;
};

}  // namespace millrace::server
