#include "chat/harmony_format.h"

#include "chat/custom_tools.h"
#include "chat/harmony_constraint.h"
#include "chat/harmony_parser.h"
#include "chat/harmony_render.h"
#include "chat/tools.h"

namespace millrace::chat {
namespace {

class HarmonyFormat : public Format {
 public:
  HarmonyFormat(std::shared_ptr<const Codec> codec, std::shared_ptr<const Grammars> grammars,
                const HarmonyTokens& tokens)
      : codec_(std::move(codec)),
        grammars_(std::move(grammars)),
        tokens_(tokens),
        text_(text_mask(*codec_)) {}

  std::string_view name() const override { return "harmony"; }

  std::vector<int32_t> prompt(const Conversation& conversation, size_t max_tokens) const override {
    check_tool_choice(conversation);
    return render_harmony(*codec_, tokens_, conversation, max_tokens);
  }

  std::unique_ptr<AnswerParser> parser(const Conversation& conversation) const override {
    std::vector<std::string> tools;
    for (const Tool* tool : callable_tools(conversation)) tools.push_back(tool->name);
    return read_custom_calls(std::make_unique<HarmonyParser>(tokens_, std::move(tools)), conversation);
  }

  std::vector<int32_t> stop_tokens() const override {
    std::vector<int32_t> out;
    for (const int32_t token : {tokens_.ret, tokens_.call}) {
      if (token >= 0) out.push_back(token);
    }
    return out;
  }

  std::shared_ptr<const TokenConstraint> constraint(
      const Conversation& conversation, std::shared_ptr<const grammar::Grammar> content) const override {
    check_tool_choice(conversation);
    return harmony_constraint(codec_, *grammars_, tokens_, text_, conversation, std::move(content));
  }

 private:
  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<const Grammars> grammars_;
  HarmonyTokens tokens_;
  std::vector<uint64_t> text_;  // mask of what is no control token
};

}  // namespace

std::unique_ptr<Format> make_harmony_format(std::shared_ptr<const Codec> codec,
                                            std::shared_ptr<const Grammars> grammars) {
  const HarmonyTokens tokens = find_harmony_tokens(*codec);
  if (!tokens.complete()) return nullptr;
  return std::make_unique<HarmonyFormat>(std::move(codec), std::move(grammars), tokens);
}

}  // namespace millrace::chat
