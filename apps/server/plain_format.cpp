#include "plain_format.h"

#include "json_text.h"

namespace millrace::server {
namespace {

class PlainParser final : public chat::AnswerParser {
 public:
  void token(int32_t /*token*/, std::string_view text, std::vector<chat::Delta>& out) override {
    add(text, out);
  }
  void finish(std::string_view text, std::vector<chat::Delta>& out) override { add(text, out); }

 private:
  static void add(std::string_view text, std::vector<chat::Delta>& out) {
    if (!text.empty()) out.push_back({.kind = chat::Delta::Kind::kContent, .text = std::string(text)});
  }
};

class PlainFormat final : public chat::Format {
 public:
  PlainFormat(const Engine& engine, Constraints& constraints) : engine_(engine), constraints_(constraints) {}
  std::string_view name() const override { return "plain"; }
  std::vector<int32_t> prompt(const chat::Conversation& conversation) const override {
    Json messages = Json::array();
    for (const chat::Message& m : conversation.messages) {
      messages.push_back({{"role", m.role}, {"content", m.content}});
    }
    const Json variables = {{"messages", messages}};
    return engine_.tokenize(engine_.render_chat_json(variables.dump()), false, true);
  }
  std::unique_ptr<chat::AnswerParser> parser(const chat::Conversation& /*conversation*/) const override {
    return std::make_unique<PlainParser>();
  }
  std::vector<int32_t> stop_tokens() const override { return {}; }
  std::shared_ptr<const TokenConstraint> constraint(
      const chat::Conversation& /*conversation*/,
      std::shared_ptr<const grammar::Grammar> content) const override {
    return constraints_.for_text(std::move(content));
  }

 private:
  const Engine& engine_;
  Constraints& constraints_;
};

}  // namespace

std::unique_ptr<chat::Format> make_plain_format(const Engine& engine, Constraints& constraints) {
  return std::make_unique<PlainFormat>(engine, constraints);
}

}  // namespace millrace::server
