// Constraints: what a request says its answer must look like, compiled (and kept for the next request that
// says the same) into a grammar.
#pragma once

#include <memory>
#include <string>

#include "chat/engine_grammars.h"
#include "chat/format.h"
#include "grammar/grammar.h"
#include "json_fields.h"
#include "millrace/engine.h"

namespace millrace::server {

class Constraints {
 public:
  // `objects`: what a request gets that says nothing of them.
  Constraints(const Engine& engine, grammar::Objects objects)
      : engine_(engine), objects_(objects), grammars_(std::make_shared<chat::EngineGrammars>(engine)) {}
  using Grammar = std::shared_ptr<const grammar::Grammar>;

  // response_format, regex or grammar: at most one of them; null when there is none. A schema is also told to
  // the conversation, for formats that show it to the model.
  Grammar of_request(const Fields& fields, chat::Conversation* conversation = nullptr);
  // {"type": "json_schema", ...}: in a chat the schema lies in json_schema, in a response beside the type.
  Grammar of_format(const Fields& format, chat::Conversation* conversation) {
    return of_format(format, conversation->objects, conversation);
  }
  // What a request says of objects without additionalProperties: open_objects.
  grammar::Objects objects(const Fields& fields) const;
  std::shared_ptr<const chat::EngineGrammars> grammars() const { return grammars_; }
  // For a plain text: from its first token to its end.
  std::shared_ptr<const TokenConstraint> for_text(Grammar grammar);

 private:
  // `objects`: of a schema that is not strict.
  Grammar of_format(const Fields& format, grammar::Objects objects, chat::Conversation* conversation);
  Grammar compiled(grammar::GrammarCache::Kind kind, const std::string& text, const std::string& path);

  const Engine& engine_;
  const grammar::Objects objects_;
  std::shared_ptr<const chat::EngineGrammars> grammars_;
};

}  // namespace millrace::server
