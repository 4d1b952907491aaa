// ChatTemplate: parse once, render many times. Here internal errors get the file's name and the line.
#include "jinja/chat_template.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "jinja/evaluator.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/python_text.h"
#include "jinja/tojson.h"

namespace millrace {

struct ChatTemplate::Program {
  std::string source;
  jinja::Body body;
};

namespace {

// A message is one line; what a template raises may hold any text.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  constexpr size_t kMax = 500;
  if (text.size() > kMax) {
    size_t end = kMax;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
    text = text.substr(0, end) + "...";
  }
  return text;
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view source_text, const std::string& source) {
  if (!jinja::is_valid_utf8(source_text)) {
    throw_error(ErrorCode::kBadInput, "{}: the chat template is not UTF-8", source);
  }
  auto program = std::make_unique<Program>();
  program->source = source;
  try {
    program->body = jinja::parse_template(source_text);
  } catch (const jinja::SyntaxError& e) {
    if (e.unsupported) {
      throw_error(ErrorCode::kUnsupported, "{}: chat template line {}: {} is not supported", source, e.line,
                  one_line(e.message));
    }
    throw_error(ErrorCode::kBadInput, "{}: chat template line {}: {}", source, e.line, one_line(e.message));
  } catch (const jinja::TemplateError& e) {
    throw_error(e.code, "{}: chat template: {}", source, one_line(e.what()));
  }
  program_ = std::move(program);
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const nlohmann::ordered_json& variables,
                                 const RenderOptions& options) const {
  if (!variables.is_object()) {
    throw_error(ErrorCode::kBadInput, "{}: the chat template's variables are a JSON {}, expected an object",
                program_->source, variables.type_name());
  }
  jinja::Budget budget;
  jinja::RenderState state;
  state.now = options.now;
  jinja::Evaluator evaluator(state);
  try {
    for (const auto& [name, value] : variables.items()) evaluator.set_variable(name, jinja::from_json(value));
    return evaluator.run(program_->body);
  } catch (const jinja::TemplateError& e) {
    const char* suffix = e.code == ErrorCode::kUnsupported ? " is not supported" : "";
    throw_error(e.code, "{}: chat template line {}: {}{}", program_->source, evaluator.line(),
                one_line(e.what()), suffix);
  }
}

}  // namespace millrace
