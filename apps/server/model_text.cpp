#include "model_text.h"

#include <algorithm>

#include "base/error.h"
#include "engine/load_tokenizer.h"
#include "engine/render_chat.h"
#include "io/checkpoint.h"
#include "model/model.h"

namespace millrace::server {
namespace {

// gpt-oss's conversations are written without its template (src/chat/harmony_format.h).
bool speaks_harmony(const Tokenizer& tokenizer) {
  constexpr const char* kNames[] = {"<|start|>", "<|end|>", "<|message|>", "<|channel|>"};
  return std::all_of(std::begin(kNames), std::end(kNames),
                     [&](const char* name) { return tokenizer.find(name).has_value(); });
}

}  // namespace

bool check_model_text(const std::string& path) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  const std::shared_ptr<const Tokenizer> tokenizer = load_tokenizer(checkpoint);
  if (read_config(checkpoint).encoder || speaks_harmony(*tokenizer)) return true;
  const std::string text = chat_template_text(checkpoint);
  if (text.empty()) return false;
  const ChatTemplate parsed(text, path);
  try {
    render_chat(parsed, *tokenizer, {{"messages", to_json({{.role = "user", .content = "Hello"}})}});
  } catch (const Error& error) {
    throw_error(error.code(), "{}: the chat template cannot render a message: {}", path, error.what());
  }
  return true;
}

}  // namespace millrace::server
