// Any bytes as a chat template, rendered with a small conversation: an Error, or text.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "jinja/chat_template.h"
#include "touch.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto variables = nlohmann::ordered_json::parse(R"({
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <b>'\"\n"},
                 {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}],
    "add_generation_prompt": true, "bos_token": "<s>", "n": 3, "xs": [3, 1, 2], "nothing": null})");
  millrace::RenderOptions options;
  options.now = 1753000000;
  try {
    const millrace::ChatTemplate chat_template({reinterpret_cast<const char*>(data), size}, "input");
    millrace::fuzz::touch(std::string_view(chat_template.render(variables, options)));
  } catch (const millrace::Error& error) {
    // One line that begins with the file's name; what the template says may be in any script.
    const std::string_view message = error.what();
    if (!message.starts_with("input: ")) __builtin_trap();
    for (const char c : message) {
      if (static_cast<unsigned char>(c) < 0x20) __builtin_trap();
    }
  }
  return 0;
}
