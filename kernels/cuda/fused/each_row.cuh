// Kernels that treat every eight columns alike, whatever row they are in: an Op loads a part of a row and
// then finishes it, so that the loads of several parts are under way at once.
#pragma once

#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/resources.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {

// n / d for n below 2^31 by a multiplication.
struct FastDivide {
  uint32_t divisor, factor, shift;
  explicit FastDivide(uint32_t d) : divisor(d), factor(0), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __host__ __device__ uint32_t operator()(uint32_t n) const {
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * factor) >> 32);
    return (high + n) >> shift;
  }
};

inline constexpr int kEachThreads = 256;
inline constexpr int kEachParts = 2;  // of a thread: with 2,048 threads 64 KB of an SM's loads are under way

// What an Op knows of its arrays: its kForm, if it has one.
template <class Op>
consteval Form form_of() {
  if constexpr (requires { Op::kForm; }) return Op::kForm;
  return Form::kAny;
}

// Op: `struct Loaded`; Loaded load(row, col, n) const; void finish(loaded, row, col, n) const.
template <class Op>
__global__ void __launch_bounds__(kEachThreads)
    each_row_kernel(Op op, int64_t first_row, uint32_t parts, FastDivide by_row, int64_t cols) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const uint32_t first = blockIdx.x * (kEachThreads * kEachParts) + threadIdx.x;
  typename Op::Loaded loaded[kEachParts];
  int64_t row[kEachParts], col[kEachParts];
  int n[kEachParts];
#pragma unroll
  for (int j = 0; j < kEachParts; ++j) {
    const uint32_t part = first + j * kEachThreads, r = by_row(part);
    row[j] = first_row + r;
    col[j] = static_cast<int64_t>(part - r * by_row.divisor) * kColumns;
    n[j] = part < parts ? columns_left<form_of<Op>()>(cols, col[j]) : 0;
    if (n[j] > 0) loaded[j] = op.load(row[j], col[j], n[j]);
  }
#pragma unroll
  for (int j = 0; j < kEachParts; ++j) {
    if (n[j] > 0) op.finish(loaded[j], row[j], col[j], n[j]);
  }
}

template <class Op>
void launch_each_row(const char* name, const Op& op, int64_t rows, int64_t cols, const Launch& at) {
  const int64_t parts_per_row = (cols + kColumns - 1) / kColumns;
  constexpr int64_t kMaxParts = int64_t{1} << 30, kPerCta = kEachThreads * kEachParts;
  const int64_t rows_at_once = kMaxParts / parts_per_row;  // at least 4: cols is below 2^31
  const FastDivide by_row(static_cast<uint32_t>(parts_per_row));
  for (int64_t row = 0; row < rows; row += rows_at_once) {
    const int64_t parts = (rows - row < rows_at_once ? rows - row : rows_at_once) * parts_per_row;
    launch_overlapping(name, 1, each_row_kernel<Op>,
                       dim3(static_cast<unsigned>((parts + kPerCta - 1) / kPerCta)), kEachThreads, 0, at, op,
                       row, static_cast<uint32_t>(parts), by_row, cols);
  }
}

}  // namespace millrace::cuda
