// How the fused operations are cut into tasks, and what those with classes share.
#pragma once

#include <algorithm>

#include "kernels/cpu/context.h"
#include "millrace/kernels.h"

namespace millrace::cpu {

inline FloatRow row_at(const mr_rows& rows, int64_t row, int64_t col = 0) {
  if (rows.data == nullptr) return {nullptr, MR_F32};
  const int64_t bytes = rows.type == MR_F32 ? 4 : 2;
  return {static_cast<uint8_t*>(rows.data) + (row * rows.stride + col) * bytes, rows.type};
}
inline FloatRow row_of(const mr_vector& vector, int64_t col = 0) {
  return row_at({vector.data, vector.type, 0}, 0, col);
}

// What is prefetched beside a row.
inline int64_t row_after(int64_t row, int64_t rows) { return row + 1 < rows ? row + 1 : row; }

inline constexpr int64_t kElementsOfTask = 1 << 14;  // 64 KiB of float32: long enough to be worth handing out

// body(row) for all rows.
template <class Body>
void each_row(const Context& ctx, int64_t rows, int64_t cols, const Body& body) {
  ctx.pool.parallel_for(rows, std::max<int64_t>(1, kElementsOfTask / cols),
                        [&](int64_t begin, int64_t end, int) {
                          for (int64_t row = begin; row < end; ++row) body(row);
                        });
}

// body(row, first column, columns): rows of many columns are cut, at multiples of kElementsOfTask.
template <class Body>
void each_part(const Context& ctx, int64_t rows, int64_t cols, const Body& body) {
  const int64_t parts = (cols + kElementsOfTask - 1) / kElementsOfTask;
  each_row(ctx, rows * parts, std::min(cols, kElementsOfTask), [&](int64_t i) {
    const int64_t col = i % parts * kElementsOfTask;
    body(i / parts, col, std::min(kElementsOfTask, cols - col));
  });
}

// Error{kBadInput} for a class outside [0, classes) that is not *ignored (which may be null).
void check_classes(const int32_t* ids, int64_t count, int64_t classes, const int32_t* ignored,
                   const char* name);

// to[i] = dloss * (exp(logits[i] - lse) - (i == target)), i < count; a target outside is in another part.
// `to` may be logits.
void cross_entropy_gradient(const FusedKernels& kernels, const FloatRow& logits, int64_t count,
                            int64_t target, float lse, float dloss, const FloatRow& to);
void fill_zeros(const FloatRow& row, int64_t count);

}  // namespace millrace::cpu
