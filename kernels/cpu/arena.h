// An arena lays an operation's workspace out in memory that the caller brought. Running the same layout over
// no memory tells how many bytes it needs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace millrace::cpu {

class Arena {
 public:
  explicit Arena(uint8_t* base) : base_(base) {}

  // Memory for `count` values, aligned for any vector; null when the arena only counts.
  template <class T>
  T* take(int64_t count) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    // NOLINTNEXTLINE(bugprone-sizeof-expression): of pointers too
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace millrace::cpu
