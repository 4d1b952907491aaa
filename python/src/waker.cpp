#include "waker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "base/error.h"

namespace millrace::python {

Waker::Waker() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) {
    throw_error(ErrorCode::kIo, "cannot make a file descriptor for an answer: {}",
                std::system_category().message(errno));
  }
}

Waker::~Waker() { ::close(fd_); }

// Both can fail only where the counter is full or empty, which is as good.
void Waker::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd_, &one, sizeof(one));
}

void Waker::clear() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t taken = ::read(fd_, &count, sizeof(count));
}

bool Waker::wait(int milliseconds) const {
  pollfd which{.fd = fd_, .events = POLLIN, .revents = 0};
  return ::poll(&which, 1, milliseconds) > 0;
}

}  // namespace millrace::python
