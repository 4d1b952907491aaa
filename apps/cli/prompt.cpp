#include "prompt.h"

#include "base/check.h"
#include "engine/chat.h"

namespace millrace::cli {

void add_message(Messages& messages, const std::string& role, const std::string& content) {
  messages.push_back({{"role", role}, {"content", valid_utf8(content)}});
}

std::string render_chat(Runtime& runtime, const Messages& messages) {
  const ChatTemplate* chat_template = runtime.chat_template();
  MILLRACE_CHECK(chat_template != nullptr);
  return millrace::render_chat(*chat_template, runtime.tokenizer(), {{"messages", messages}});
}

std::vector<int32_t> encode_chat(Runtime& runtime, const Messages& messages) {
  // The template writes the bos itself.
  return runtime.tokenizer().encode(render_chat(runtime, messages),
                                    {.add_special = false, .parse_special = true});
}

}  // namespace millrace::cli
