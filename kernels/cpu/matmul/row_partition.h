// How the rows of a weight matrix are cut into tasks for threads. Cuts depend on shapes and the number of
// threads only, and no output depends on where a cut is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

inline constexpr int64_t kRowsAtOnce = 16;       // weight rows that a kernel dequantizes together
inline constexpr int64_t kDequantizedRows = 4;   // that a thread dequantizes where a type has no kernel
inline constexpr int64_t kMaxRowsPerTask = 128;  // of weights

// Up to so many rows of activations are a small batch, and so many rows of weights have outputs that then fit
// into a thread's buffer.
inline constexpr int64_t kSmallBatchRows = 16;
inline constexpr int64_t kMaxSmallBatchOutputs = kMaxRowsPerPass * kMaxRowsPerTask / kSmallBatchRows;

inline int64_t tasks_for(int64_t rows, int64_t per_task) { return (rows + per_task - 1) / per_task; }

// Rows per task: enough tasks for `threads` to share unevenly, in multiples of 32 so that a task's outputs
// are whole blocks for the next product.
inline int64_t rows_per_task(int64_t total_rows, int threads) {
  const int64_t share = total_rows / (static_cast<int64_t>(threads) * 8);
  return std::clamp<int64_t>((share + 31) / 32 * 32, 32, kMaxRowsPerTask);
}

// The same for outputs that nobody reads in blocks: a small matrix (a router) is shared by all threads too.
inline int64_t unblocked_rows_per_task(int64_t total_rows, int threads) {
  if (total_rows >= int64_t{64} * threads) return rows_per_task(total_rows, threads);
  const int64_t share = (total_rows + threads - 1) / threads;
  return share < 16 ? std::max<int64_t>(1, share) : (share + 15) / 16 * 16;
}

// The rows of a product with a small batch, where reading the weights is all: handed out in parts that become
// smaller, so that most rows follow rows of the same part (whose kernel prefetches them) and nobody waits
// long for the last part. A thread holds two parts, the one it is at and the one it prefetches: with parts of
// a quarter of what is left to each, one thread at half speed among sixteen costs a twentieth; with halves it
// cost two fifths. Few threads get halves: one of two that is slow is half of them in any case, and a small
// model's matrices come to very short parts. The first part of a thread is always the same: what lies there
// may be prefetched before.
class ShrinkingParts {
 public:
  // unit: rows of the last parts.
  ShrinkingParts(int64_t rows, int64_t unit, int threads) : rows_(rows), unit_(unit), threads_(threads) {
    const int64_t parts = threads < kManyThreads ? 2 : 4;  // of what is left to a thread
    int64_t left = tasks_for(rows, unit);
    for (int64_t& size : sizes_) {
      size = left / (parts * threads_);
      if (size <= 1) size = 0;
      left -= size * threads_;
      count_ += size > 0 ? threads_ : 0;
    }
    count_ += left;
  }
  int64_t count() const { return count_; }
  // Of each thread's first part.
  int64_t first_rows() const { return std::max<int64_t>(sizes_[0], 1) * unit_; }
  struct Part {
    int64_t first, count;
  };
  Part part(int64_t index) const {
    int64_t at = 0;
    for (const int64_t size : sizes_) {
      if (size == 0) break;
      if (index < threads_) return cut(at + index * size, size);
      index -= threads_;
      at += size * threads_;
    }
    return cut(at + index, 1);
  }

 private:
  Part cut(int64_t unit, int64_t units) const {
    const int64_t first = unit * unit_;
    return {first, std::min(units * unit_, rows_ - first)};
  }
  int64_t rows_, unit_, threads_, count_ = 0;
  static constexpr int kManyThreads = 8;
  int64_t sizes_[10] = {};  // units of a part, `threads` parts of each; then single units
};

// Rows that a thread multiplies together: [first, first + count), and where its next rows begin, -1 if that
// is not known. prefetched: the first of them.
struct RowPart {
  int64_t first, count, next;
  bool prefetched;
};

// body(part, thread) for parts that cover all rows.
template <class Body>
void parallel_rows(ThreadPool& pool, const ShrinkingParts& parts, Body body) {
  pool.parallel_parts(parts.count(), [&](const LoopPart& part, int thread) {
    const auto [first, count] = parts.part(part.index);
    body(RowPart{first, count, part.next < 0 ? -1 : parts.part(part.next).first, part.prefetched}, thread);
  });
}

// Calls body(first, count, next, prefetched) for a part in pieces whose outputs fit into a thread's buffer.
template <class Body>
void in_bufferfuls(const RowPart& part, Body body) {
  for (int64_t r = 0; r < part.count; r += kMaxSmallBatchOutputs) {
    const int64_t some = std::min(kMaxSmallBatchOutputs, part.count - r);
    body(part.first + r, some, r + some < part.count ? part.first + r + some : part.next,
         part.prefetched || r > 0);
  }
}

}  // namespace millrace::cpu
