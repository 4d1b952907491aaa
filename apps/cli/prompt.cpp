#include "prompt.h"

namespace millrace::cli {

void add_message(Messages& messages, const std::string& role, const std::string& content) {
  messages.push_back({{"role", role}, {"content", valid_utf8(content)}});
}

std::vector<int32_t> encode_chat(const Engine& engine, const Messages& messages) {
  const std::string text = engine.render_chat_json(Messages{{"messages", messages}}.dump());
  return engine.tokenize(text, /*add_special=*/false);  // the template writes the bos itself
}

}  // namespace millrace::cli
