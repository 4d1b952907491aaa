#include "confirm.h"

#include <unistd.h>

#include "base/error.h"
#include "interrupt.h"
#include "output.h"

namespace millrace::cli {
namespace {

bool& answered_yes() {
  static bool yes = false;  // a process runs one command
  return yes;
}

}  // namespace

void add_yes_option(Command& command, const std::string& help) {
  command.flag("-y,--yes", answered_yes(), help);
}

bool confirmed(const std::string& question, const std::string& refusal) {
  if (answered_yes()) return true;
  if (::isatty(STDIN_FILENO) != 1 || !stderr_is_terminal()) throw_error(ErrorCode::kBadInput, "{}", refusal);
  write_stderr(question + " [y/N] ");
  std::string answer;
  char byte = 0;
  while (read_byte(&byte) == 1 && byte != '\n') answer += byte;
  throw_if_interrupted();
  return answer == "y" || answer == "Y" || answer == "yes" || answer == "Yes";
}

}  // namespace millrace::cli
