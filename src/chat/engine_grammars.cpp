#include "chat/engine_grammars.h"

#include <utility>

namespace millrace::chat {

std::unique_ptr<TokenConstraint> EngineGrammars::constrain(std::shared_ptr<const grammar::Grammar> grammar,
                                                           std::vector<int32_t> end_tokens) const {
  return grammar::constrain(std::move(grammar), vocabulary(), std::move(end_tokens));
}

std::shared_ptr<const grammar::Vocabulary> EngineGrammars::vocabulary() const {
  const std::lock_guard lock(mutex_);
  if (vocabulary_) return vocabulary_;
  std::vector<std::string> bytes(static_cast<size_t>(engine_.model().vocab));
  for (size_t t = 0; t < bytes.size(); ++t) {
    const int32_t token = static_cast<int32_t>(t);
    try {
      if (!engine_.is_special(token)) bytes[t] = engine_.token_text(token);
    } catch (const Error&) {
      break;  // a model may have more rows than its tokenizer has tokens
    }
  }
  return vocabulary_ = grammar::make_vocabulary(bytes);
}

}  // namespace millrace::chat
