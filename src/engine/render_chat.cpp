#include "engine/render_chat.h"

#include "base/utf8.h"

namespace millrace {

std::string render_chat(const ChatTemplate& chat_template, const Tokenizer& tokenizer,
                        nlohmann::ordered_json variables) {
  const auto add = [&](const char* name, nlohmann::ordered_json value) {
    if (!variables.contains(name)) variables[name] = std::move(value);
  };
  add("add_generation_prompt", true);
  add("bos_token", tokenizer.bos() ? tokenizer.token_bytes(*tokenizer.bos(), true) : "");
  const std::vector<TokenId> ends = tokenizer.end_tokens();
  add("eos_token", ends.empty() ? "" : tokenizer.token_bytes(ends.front(), true));
  return chat_template.render(variables);
}

nlohmann::ordered_json to_json(const std::vector<ChatMessage>& messages) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const ChatMessage& message : messages) {
    out.push_back({{"role", valid_utf8(message.role)}, {"content", valid_utf8(message.content)}});
  }
  return out;
}

}  // namespace millrace
