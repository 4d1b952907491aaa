// The LineEditor of builds without libedit: the terminal's own editing, no history.
#include "line_editor.h"
#include "output.h"

namespace millrace::cli {

struct LineEditor::State {};

LineEditor::LineEditor(const std::string&) {}
LineEditor::~LineEditor() = default;

std::optional<std::string> LineEditor::read(const std::string& prompt) {
  write_stderr(prompt);
  return read_plain_line();
}

void LineEditor::remember(const std::string&) {}

}  // namespace millrace::cli
