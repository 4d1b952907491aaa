// The format of an engine's model, with the engine as its codec and src/grammar behind its constraints.
#include <mutex>

#include "chat/codec.h"
#include "chat/format.h"
#include "chat/harmony_format.h"
#include "chat/plan_constraint.h"
#include "chat/template_format.h"

namespace millrace::chat {
namespace {

class EngineCodec : public Codec {
 public:
  explicit EngineCodec(const Engine& engine) : engine_(engine) {}

  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override {
    if (!engine_.model().has_tokenizer) return {};
    return engine_.tokenize(text, false, parse_special);
  }
  // A model may have more rows than its tokenizer has tokens.
  std::string token_text(int32_t token) const override {
    try {
      return engine_.token_text(token);
    } catch (const Error&) {
      return "";
    }
  }
  bool is_special(int32_t token) const override {
    try {
      return engine_.is_special(token);
    } catch (const Error&) {
      return false;
    }
  }
  int32_t vocab() const override { return engine_.model().vocab; }
  std::vector<int32_t> end_tokens() const override { return engine_.model().end_tokens; }
  bool has_template() const override { return engine_.model().has_chat_template; }
  std::string render(std::string_view variables) const override {
    return engine_.render_chat_json(variables);
  }

 private:
  const Engine& engine_;
};

class VocabularyGrammars : public Grammars {
 public:
  explicit VocabularyGrammars(std::shared_ptr<const Codec> codec) : codec_(std::move(codec)) {}

  std::unique_ptr<TokenConstraint> constrain(std::shared_ptr<const grammar::Grammar> grammar,
                                             std::vector<int32_t> end_tokens) const override {
    return grammar::constrain(std::move(grammar), vocabulary(), std::move(end_tokens));
  }
  std::shared_ptr<const grammar::Grammar> json_schema(std::string_view schema) const override {
    return grammar::compile_json_schema(schema);
  }
  std::shared_ptr<const grammar::Grammar> json_object() const override {
    return grammar::compile_json_object();
  }

 private:
  // Made for the first request that needs it.
  std::shared_ptr<const grammar::Vocabulary> vocabulary() const {
    const std::lock_guard lock(mutex_);
    if (!vocabulary_) {
      std::vector<std::string> bytes(static_cast<size_t>(codec_->vocab()));
      for (int32_t token = 0; token < codec_->vocab(); ++token) {
        if (!codec_->is_special(token)) bytes[static_cast<size_t>(token)] = codec_->token_text(token);
      }
      vocabulary_ = grammar::make_vocabulary(bytes);
    }
    return vocabulary_;
  }

  std::shared_ptr<const Codec> codec_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const grammar::Vocabulary> vocabulary_;
};

}  // namespace

std::unique_ptr<Format> make_format(const Engine& engine) {
  auto codec = std::make_shared<EngineCodec>(engine);
  auto grammars = std::make_shared<VocabularyGrammars>(codec);
  if (auto harmony = make_harmony_format(codec, grammars)) return harmony;
  return make_template_format(codec, grammars);
}

}  // namespace millrace::chat
