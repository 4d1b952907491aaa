// LineEditor: a line from the person at the keyboard, with editing and a history kept in a file where the
// terminal and the build allow it (line_editor/), plainly read otherwise.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace millrace::cli {

class LineEditor {
 public:
  // history_path may be empty: no file then.
  explicit LineEditor(const std::string& history_path);
  ~LineEditor();

  // The line without its newline; nothing at the end of the input. Ctrl-C gives an empty line and sets the
  // interrupt flag.
  std::optional<std::string> read(const std::string& prompt);
  void remember(const std::string& line);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// One line from standard input byte by byte, for when it is not a terminal.
std::optional<std::string> read_plain_line();

}  // namespace millrace::cli
