#include "line_editor.h"

#include "interrupt.h"

namespace millrace::cli {

std::optional<std::string> read_plain_line() {
  std::string line;
  char c = 0;
  while (true) {
    const int n = read_byte(&c);
    if (n < 0 && interrupt_flag()) return std::string();
    if (n <= 0) return line.empty() ? std::nullopt : std::optional(line);
    if (c == '\n') return line;
    line += c;
  }
}

}  // namespace millrace::cli
