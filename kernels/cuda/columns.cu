#include "kernels/cuda/columns.h"

#include <algorithm>

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // past that a thread takes several turns

unsigned grid_for(int64_t values) {
  return static_cast<unsigned>(std::min(kMaxBlocks, (values + kThreads - 1) / kThreads));
}

// Vector: float, or float4 where every width and bound is a multiple of 4 (counts are in vectors then).
template <class Vector>
__global__ void __launch_bounds__(kThreads)
    take_columns_kernel(const Vector* whole, int64_t total, int64_t first, int64_t width, int64_t count,
                        Vector* out) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    out[i] = whole[i / width * total + first + i % width];
  }
}

template <class Vector>
__global__ void __launch_bounds__(kThreads)
    join_columns_kernel(const Vector* parts, ColumnParts cut, int64_t rows, int64_t total, Vector* whole) {
  const int64_t step = int64_t{gridDim.x} * kThreads, count = rows * total;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = i / total, column = i % total;
    int p = 0;
    while (column >= cut.bounds[p + 1]) ++p;
    const int64_t begin = cut.bounds[p], width = cut.bounds[p + 1] - begin;
    whole[i] = parts[begin * rows + row * width + column - begin];
  }
}

bool in_fours(const float* a, const float* b) {
  return reinterpret_cast<uintptr_t>(a) % sizeof(float4) == 0 &&
         reinterpret_cast<uintptr_t>(b) % sizeof(float4) == 0;
}

}  // namespace

void launch_take_columns(const float* whole, int64_t total, int64_t first, int64_t width, int64_t rows,
                         float* out, const Launch& at) {
  if (rows * width == 0) return;
  if (total % 4 == 0 && first % 4 == 0 && width % 4 == 0 && in_fours(whole, out)) {
    const int64_t count = rows * width / 4;
    take_columns_kernel<<<grid_for(count), kThreads, 0, at.stream>>>(reinterpret_cast<const float4*>(whole),
                                                                     total / 4, first / 4, width / 4, count,
                                                                     reinterpret_cast<float4*>(out));
  } else {
    const int64_t count = rows * width;
    take_columns_kernel<<<grid_for(count), kThreads, 0, at.stream>>>(whole, total, first, width, count, out);
  }
  check_launch("take_columns_kernel");
}

void launch_join_columns(const float* parts, const ColumnParts& cut, int64_t rows, float* whole,
                         const Launch& at) {
  const int64_t total = cut.total();
  if (rows * total == 0) return;
  ColumnParts fours = cut;
  bool whole_fours = in_fours(parts, whole);
  for (int p = 0; p <= cut.parts; ++p) {
    whole_fours = whole_fours && cut.bounds[p] % 4 == 0;
    fours.bounds[p] = cut.bounds[p] / 4;
  }
  if (whole_fours) {
    join_columns_kernel<<<grid_for(rows * total / 4), kThreads, 0, at.stream>>>(
        reinterpret_cast<const float4*>(parts), fours, rows, total / 4, reinterpret_cast<float4*>(whole));
  } else {
    join_columns_kernel<<<grid_for(rows * total), kThreads, 0, at.stream>>>(parts, cut, rows, total, whole);
  }
  check_launch("join_columns_kernel");
}

}  // namespace millrace::cuda
