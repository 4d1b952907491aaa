// Compiled grammars and the bytes of the model's tokens, one of each for all who constrain the answers of an
// engine.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "chat/plan_constraint.h"
#include "grammar/grammar.h"
#include "millrace/engine.h"

namespace millrace::chat {

class EngineGrammars : public Grammars {
 public:
  explicit EngineGrammars(const Engine& engine) : engine_(engine) {}  // which must outlive it

  // Compiled, or found: the second request with the same text starts with the first one's masks.
  std::shared_ptr<const grammar::Grammar> get(grammar::GrammarCache::Kind kind, std::string_view text) const {
    return cache_.get(kind, text);
  }
  std::unique_ptr<TokenConstraint> constrain(std::shared_ptr<const grammar::Grammar> grammar,
                                             std::vector<int32_t> end_tokens) const override;
  std::shared_ptr<const grammar::Grammar> json_schema(std::string_view schema,
                                                      grammar::Objects objects) const override {
    using Kind = grammar::GrammarCache::Kind;
    switch (objects) {
      case grammar::Objects::kOpen:
        return get(Kind::kOpenJsonSchema, schema);
      case grammar::Objects::kStrict:
        return get(Kind::kStrictJsonSchema, schema);
      case grammar::Objects::kClosed:
        break;
    }
    return get(Kind::kJsonSchema, schema);
  }
  std::shared_ptr<const grammar::Grammar> json_object() const override {
    return get(grammar::GrammarCache::Kind::kJsonObject, "");
  }
  std::shared_ptr<const grammar::Grammar> regex(std::string_view pattern) const override {
    return get(grammar::GrammarCache::Kind::kRegex, pattern);
  }

 private:
  std::shared_ptr<const grammar::Vocabulary> vocabulary() const;

  const Engine& engine_;
  mutable grammar::GrammarCache cache_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const grammar::Vocabulary> vocabulary_;  // made when first wanted
};

}  // namespace millrace::chat
