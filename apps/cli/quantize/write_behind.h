// WriteBehind: a thread that writes buffers to a file while the next ones are being made, so that a pass
// takes the longer of the two and not their sum. With no more than two buffers the one is waited for that is
// slower at the moment, and with small ones what is written is still in a cache.
#pragma once

#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "io/gguf_writer.h"

namespace millrace::cli {

class WriteBehind {
 public:
  explicit WriteBehind(io::GgufWriter& writer);
  ~WriteBehind();  // waits for the write under way; what failed is then lost, so call finish() first
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  // A buffer of at least `bytes` that nobody reads; waits for one. Throws what an earlier write has thrown.
  std::byte* buffer(size_t bytes);
  // Hands the buffer's first `bytes` to the writer.
  void submit(size_t bytes);
  // Waits until everything is written. Throws what a write has thrown.
  void finish();
  double waited() const { return waited_; }  // seconds, in buffer() and finish()

 private:
  struct Piece {
    std::vector<std::byte> data;
    size_t bytes = 0;
    bool full = false;
  };
  void run();
  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, Condition&& condition);

  io::GgufWriter& writer_;
  std::array<Piece, 8> pieces_;
  size_t filling_ = 0;  // the piece the caller fills; the writer goes round likewise
  std::mutex mutex_;    // guards full, stop_ and failure_
  std::condition_variable changed_;
  bool stop_ = false;
  std::exception_ptr failure_;
  double waited_ = 0.0;
  std::thread thread_;
};

}  // namespace millrace::cli
