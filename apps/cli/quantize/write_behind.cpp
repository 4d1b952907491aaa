#include "quantize/write_behind.h"

#include <algorithm>
#include <chrono>

namespace millrace::cli {

WriteBehind::WriteBehind(io::GgufWriter& writer) : writer_(writer), thread_([this] { run(); }) {}

WriteBehind::~WriteBehind() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WriteBehind::run() {
  for (size_t next = 0;; next = (next + 1) % pieces_.size()) {
    Piece& piece = pieces_[next];
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return piece.full || stop_; });
    if (!piece.full) return;
    const bool failed = failure_ != nullptr;
    lock.unlock();
    std::exception_ptr failure;
    try {
      if (!failed) writer_.write(piece.data.data(), piece.bytes);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    piece.full = false;
    if (failure) failure_ = failure;
    lock.unlock();
    changed_.notify_all();
  }
}

template <class Condition>
void WriteBehind::wait(std::unique_lock<std::mutex>& lock, Condition&& condition) {
  if (condition()) return;
  const auto start = std::chrono::steady_clock::now();
  changed_.wait(lock, condition);
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::byte* WriteBehind::buffer(size_t bytes) {
  Piece& piece = pieces_[filling_];
  std::unique_lock lock(mutex_);
  wait(lock, [&] { return !piece.full; });
  if (failure_) std::rethrow_exception(failure_);
  if (piece.data.size() < bytes) piece.data.resize(bytes);
  return piece.data.data();
}

void WriteBehind::submit(size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    pieces_[filling_].bytes = bytes;
    pieces_[filling_].full = true;
  }
  changed_.notify_all();
  filling_ = (filling_ + 1) % pieces_.size();
}

void WriteBehind::finish() {
  std::unique_lock lock(mutex_);
  wait(lock, [&] {
    return std::none_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return piece.full; });
  });
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace millrace::cli
