// A chunk of a matrix product: picks the kernel for the weight's type and walks the activation rows in passes
// that stay in the cache. Callers split products into tasks; nothing here knows threads.
#pragma once

#include <algorithm>

#include "backend/cpu/weight.h"

namespace millrace::cpu {

// Activation rows in the forms that weights ask for.
struct Rows {
  const float* values = nullptr;            // [rows][cols]; absent when every weight wants blocks
  const ActivationBlock* blocks = nullptr;  // [rows][cols / 32], made only when some weight wants it
  int64_t cols = 0;
  const int32_t* index = nullptr;   // product row m reads row index[m]; absent: row m
  const Int8Tile* cells = nullptr;  // or the product's rows in their order as cells
  // For formats of powers of two, one of both: binary blocks [rows][cols / 32], or the product's rows in
  // their order (never by the index) as tiles.
  const ActivationBlock* binary = nullptr;
  const uint16_t* tiles = nullptr;
  int64_t height = kTileHeight;  // of the tiles' groups

  Rows from(
      int64_t row) const {  // the rows from `row` on, a multiple of the height where there are tiles or cells
    Rows r = *this;
    if (tiles != nullptr) r.tiles += row * cols;
    if (cells != nullptr) r.cells += row / kTileHeight * (cols / kQuantBlock);
    if (index != nullptr) {
      r.index += row;
    } else {
      if (values != nullptr) r.values += row * cols;
      if (blocks != nullptr) r.blocks += row * (cols / kQuantBlock);
      if (binary != nullptr) r.binary += row * (cols / kQuantBlock);
    }
    return r;
  }
};

// Rows a thread opens at a time for weights without a kernel of their own.
inline constexpr int64_t kDecodedRows = 4;

// out[m * out_stride + r] = W[expert][first + r] . x[m], r < num_rows, m < num_m. scratch:
// [kDecodedRows][cols].
void multiply(const KernelTable& kernels, const CpuWeight& w, int64_t expert, int64_t first, int64_t num_rows,
              const Rows& x, int64_t num_m, float* out, int64_t out_stride, float* scratch,
              const PrefetchHint& chain = {});

// Rows that a kernel opens together, and so many from `row` of an expert on as what is multiplied next.
inline constexpr int64_t kRowsAtOnce = 16;
inline PrefetchHint chain_to(const CpuWeight& w, int64_t expert, int64_t row, bool asked) {
  const int64_t rows = std::min(kRowsAtOnce, w.rows - row);
  return {w.matrix.data + (expert * w.rows + row) * w.matrix.row_bytes, rows * w.matrix.row_bytes, asked};
}

inline constexpr int64_t kMaxRowsPerTask = 128;

// Rows per task: enough tasks for `threads` to share unevenly, in multiples of 32 so that a task's outputs
// are whole blocks for the next product.
inline int64_t rows_per_task(int64_t total_rows, int threads) {
  const int64_t share = total_rows / (static_cast<int64_t>(threads) * 8);
  return std::clamp<int64_t>((share + 31) / 32 * 32, 32, 128);
}

// The same for outputs that nobody reads in blocks: a small matrix (a router) is shared by all threads too.
inline int64_t plain_rows_per_task(int64_t total_rows, int threads) {
  if (total_rows >= int64_t{64} * threads) return rows_per_task(total_rows, threads);
  const int64_t share = (total_rows + threads - 1) / threads;
  return share < 16 ? std::max<int64_t>(1, share) : (share + 15) / 16 * 16;
}

// The rows of a step of few tokens, where reading the weights is all: handed out in parts that become
// smaller, so that most rows follow rows of the same part (whose kernel asks for them ahead) and nobody waits
// long for the last part. A thread holds two parts, the one it is at and the one it asks for: with parts of a
// quarter of what is left to each, one thread at half speed among sixteen costs a twentieth; with halves it
// cost two fifths. Few threads get halves: one of two that is slow is half of them in any case, and a small
// model's matrices come to very short parts. The first part of a thread is always the same: what waits there
// may be asked for before.
class ShrinkingParts {
 public:
  // unit: rows of the last parts.
  ShrinkingParts(int64_t rows, int64_t unit, int threads) : rows_(rows), unit_(unit), threads_(threads) {
    const int64_t parts = threads < kManyThreads ? 2 : 4;  // of what is left to a thread
    int64_t left = tasks_for_units(rows);
    for (int64_t& size : sizes_) {
      size = left / (parts * threads_);
      if (size <= 1) size = 0;
      left -= size * threads_;
      count_ += size > 0 ? threads_ : 0;
    }
    count_ += left;
  }
  int64_t count() const { return count_; }
  int64_t first_rows() const {
    return std::max<int64_t>(sizes_[0], 1) * unit_;
  }  // of each thread's first part
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
  int64_t tasks_for_units(int64_t rows) const { return (rows + unit_ - 1) / unit_; }
  Part cut(int64_t unit, int64_t units) const {
    const int64_t first = unit * unit_;
    return {first, std::min(units * unit_, rows_ - first)};
  }
  int64_t rows_, unit_, threads_, count_ = 0;
  static constexpr int kManyThreads = 8;
  int64_t sizes_[10] = {};  // units of a part, `threads` parts of each; then single units
};

// Up to so many tokens are a few, and so many rows of their outputs fit into a thread's buffer.
inline constexpr int64_t kFewTokens = 16;
inline constexpr int64_t kMostFewRows = kMaxRowsPerPass * kMaxRowsPerTask / kFewTokens;

inline int64_t tasks_for(int64_t rows, int64_t per_task) { return (rows + per_task - 1) / per_task; }

}  // namespace millrace::cpu
