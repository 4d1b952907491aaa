#include "interrupt.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace millrace::cli {
namespace {

std::atomic<bool> flag{false};
std::atomic<int> last_signal{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void on_signal(int signal) {
  if (flag.exchange(true)) _exit(128 + signal);
  last_signal = signal;
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = on_signal;  // no SA_RESTART: a read that waits for a line returns
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
  sigaction(SIGXFSZ, &action, nullptr);
}

const std::atomic<bool>& interrupt_flag() { return flag; }
void clear_interrupt() { flag = false; }

void throw_if_interrupted() {
  if (flag) throw Interrupted{last_signal};
}

int read_byte(char* byte) {
  // Signals are held except while ppoll waits: none can slip in between the look at the flag and the wait.
  sigset_t held, before;
  sigemptyset(&held);
  sigaddset(&held, SIGINT);
  sigaddset(&held, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &held, &before);
  int result = -1;
  while (!flag) {
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    if (::ppoll(&input, 1, nullptr, &before) < 0) {
      if (errno == EINTR) continue;  // the loop looks at the flag
      break;
    }
    const ssize_t n = ::read(STDIN_FILENO, byte, 1);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    result = static_cast<int>(n);
    break;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return result;
}

}  // namespace millrace::cli
