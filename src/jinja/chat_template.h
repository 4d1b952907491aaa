// ChatTemplate: the Jinja that model files carry, parsed once and rendered as jinja2 would (with Hugging
// Face's settings: trim_blocks, lstrip_blocks, loop controls, tojson, raise_exception, strftime_now).
#pragma once

#include <ctime>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace millrace {

struct RenderOptions {
  std::optional<std::time_t>
      now;  // what strftime_now() takes for the time, shown in local time; else the clock
};

class ChatTemplate {
 public:
  // Throws Error{kUnsupported} naming construct and line for Jinja this interpreter does not have, and
  // Error{kBadInput} for what is not Jinja at all. `source` names the file in messages.
  ChatTemplate(std::string_view source_text, const std::string& source);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // `variables` is an object: messages, tools, add_generation_prompt, bos_token, eos_token, ... Key order
  // matters (tojson prints it), hence ordered_json. raise_exception() in the template becomes
  // Error{kBadInput}. What it may use is bounded (steps, bytes, depth): a runaway template is an Error too.
  // Safe to call from several threads at once.
  std::string render(const nlohmann::ordered_json& variables, const RenderOptions& options = {}) const;

 private:
  struct Program;
  std::unique_ptr<const Program> program_;
};

}  // namespace millrace
