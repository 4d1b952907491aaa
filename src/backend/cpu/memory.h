// Memory of the cpu backend: anonymous pages that cost nothing until they are touched (the KV pools), a piece
// of the process's buffer pool (what steps write), and reading weights ahead from disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/page_warmer.h"
#include "base/thread_pool.h"

namespace millrace::cpu {

class Pages {
 public:
  Pages() = default;
  // Zeroed, page-aligned. Throws Error{kNoMemory} naming `what`.
  Pages(size_t bytes, const char* what);
  ~Pages();
  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Pages& operator=(Pages&&) = delete;

  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Copies of matrices, one behind the other in huge pages: most matrices of a small model are less than one.
class CopyMemory {
 public:
  struct Piece {
    std::shared_ptr<Pages> pages;  // hold them as long as the piece is read
    uint8_t* data;
  };
  // most: bytes that are taken altogether.
  explicit CopyMemory(size_t most) : most_(most) {}
  // Zeroed, aligned to a cache line. Throws Error{kNoMemory}.
  Piece take(size_t bytes);

 private:
  size_t most_;
  std::shared_ptr<Pages> pages_;
  size_t bytes_ = 0, used_ = 0;
};

// Does the system give anonymous memory pages of 2 MiB?
bool has_huge_pages();

// What an executor's steps write, from the buffer pool: one that is let go is there for the next executor.
class StepMemory {
 public:
  // Zeroed, aligned to 4096. Throws Error{kNoMemory} naming `what`.
  StepMemory(size_t bytes, const char* what);
  ~StepMemory();
  StepMemory(const StepMemory&) = delete;
  StepMemory& operator=(const StepMemory&) = delete;

  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Has the system read mapped weights from disk while the model is still being set up, as long as all of them
// fit in 80% of the machine's memory: more would push its own beginning out again. A model larger than memory
// is left to be paged in as it is used.
class ReadAhead {
 public:
  ReadAhead();
  // enter: pages also go to the page table, in the order of these calls, while the rest is set up and beyond:
  // for matrices that are multiplied where they lie.
  void read(const void* data, size_t bytes, bool enter);
  // On several memory nodes: reads `matrices` of rows x stride bytes now, each part of their rows by a thread
  // of the node that will multiply it, because a page of a file lies on the node that read it first.
  void read_by_node(const uint8_t* data, int64_t matrices, int64_t rows, int64_t stride, ThreadPool& pool);

 private:
  bool claim(size_t bytes);
  size_t left_;  // bytes that may still be read
  PageWarmer warmer_;
};

size_t usable_memory();  // bytes: of the machine, or what the control groups leave to this process
size_t
private_memory();  // bytes of that which the limits of this process (ulimit -d, -v) let it have for itself

}  // namespace millrace::cpu
