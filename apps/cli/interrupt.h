// Ctrl-C and termination: a flag that long work looks at, so that files and terminals are left in order. A
// second signal while the first is still unheard ends the process at once.
#pragma once

#include <atomic>
#include <csignal>

namespace millrace::cli {

struct Interrupted {  // thrown through a command, to main
  int signal = SIGINT;
};

// SIGINT and SIGTERM set the flag; SIGPIPE and SIGXFSZ are ignored: the write that caused them fails and says
// so.
void install_signal_handlers();
const std::atomic<bool>& interrupt_flag();
void clear_interrupt();
void throw_if_interrupted();

// One byte of standard input: 1, or 0 at its end, or -1 for a failure or, at once, when the flag is set or
// becomes set while waiting.
int read_byte(char* byte);

}  // namespace millrace::cli
