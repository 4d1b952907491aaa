// The format of an engine's model, with the engine as its codec.
#include "chat/format.h"

#include "chat/chat_codec.h"
#include "chat/engine_grammars.h"
#include "chat/harmony_format.h"
#include "chat/template_format.h"

namespace millrace::chat {
namespace {

class EngineCodec : public Codec {
 public:
  explicit EngineCodec(const Engine& engine) : engine_(engine) {}

  using Codec::encode;
  std::vector<int32_t> encode(std::string_view text, bool parse_special, size_t max_tokens) const override {
    if (!engine_.model().has_tokenizer) return {};
    return engine_.tokenize(text, false, parse_special, max_tokens);
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
  ImagePlace image_place() const override {
    return {engine_.model().images.written, engine_.model().images.expanded};
  }

 private:
  const Engine& engine_;
};

}  // namespace

std::unique_ptr<Format> make_format(const Engine& engine, std::shared_ptr<const EngineGrammars> grammars) {
  auto codec = std::make_shared<EngineCodec>(engine);
  if (auto harmony = make_harmony_format(codec, grammars)) return harmony;
  return make_template_format(codec, grammars);
}

}  // namespace millrace::chat
