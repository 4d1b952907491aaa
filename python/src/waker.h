// Waker: a file descriptor that becomes readable when an answer has something to take. The engine's thread
// writes to it and never waits for Python: no lock of the interpreter is taken there. asyncio watches it like
// a socket; others wait in slices, between which signals are looked at.
#pragma once

#include <functional>
#include <memory>

namespace millrace::python {

class Waker {
 public:
  Waker();
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  int fd() const { return fd_; }
  void wake() const;
  void clear() const;  // before looking at what has come
  // Until it was woken, at most so long; without the GIL.
  bool wait(int milliseconds) const;

 private:
  int fd_;
};

// Something to call from any thread, which keeps the waker alive.
inline std::function<void()> notifier(const std::shared_ptr<Waker>& waker) {
  return [waker] { waker->wake(); };
}

// How long a wait may last before signals are looked at.
inline constexpr int kSliceMs = 50;

}  // namespace millrace::python
