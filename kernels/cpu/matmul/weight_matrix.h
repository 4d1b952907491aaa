// Weights as CPU products read them: a matrix where it lies (in a file's layout), or with a few rows
// interleaved where the table has kernels for that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"
#include "kernels/cpu/matmul/row_partition.h"
#include "kernels/cpu/tables/kernel_table.h"
#include "tensor/tensor_view.h"

namespace millrace::cpu {

struct WeightMatrix {
  TensorView view;               // [experts,] rows, cols
  MatrixView matrix{};           // all experts' rows, one after the other
  Format format = Format::kF32;  // of `matrix`
  bool dequantized =
      false;  // FP8, the IQ and TQ types: to float32, a few rows at a time; format is then kF32
  int64_t experts = 1, rows = 0, cols = 0;
  int64_t expert_rows =
      0;  // of `matrix`, from one expert to the next: `rows`, or more where this is a part of each
};

// Of a product y = x W^T + b.
struct LinearWeights {
  const WeightMatrix* matrix = nullptr;
  const float* bias = nullptr;  // [experts][rows], or absent
};

// The matrix in place: its memory must outlive the result. Throws Error naming the tensor for a type without
// a kernel, rows of broken blocks, or a grid of scales that kernels do not read.
WeightMatrix weight_matrix(const TensorView& view);

// Bytes of the same matrix with rows interleaved; 0: the table has no kernels for that.
size_t interleaved_bytes(const TensorView& view, const KernelTable& kernels);
// Interleaves all experts' rows into `to`, which must outlive the result; the view is then read no more by
// products, only where rows are looked up.
WeightMatrix interleave(const TensorView& view, const KernelTable& kernels, uint8_t* to, ThreadPool& pool);

// The first rows that a kernel dequantizes together, from `row` of an expert on, as what a thread multiplies
// next. prefetched: the first rows of the product before that.
inline PrefetchHint prefetch_of(const WeightMatrix& w, int64_t expert, int64_t row, bool prefetched) {
  const int64_t rows = row + kRowsAtOnce <= w.rows ? kRowsAtOnce : w.rows - row;
  return {w.matrix.data + (expert * w.expert_rows + row) * w.matrix.row_bytes, rows * w.matrix.row_bytes,
          prefetched};
}

// `rows` rows of one matrix, or of two that are read together, for each thread.
inline FirstReads first_reads(const WeightMatrix& w, int64_t rows, const WeightMatrix* other = nullptr) {
  FirstReads reads;
  reads.data[reads.count++] = reinterpret_cast<const std::byte*>(w.matrix.data);
  if (other != nullptr) reads.data[reads.count++] = reinterpret_cast<const std::byte*>(other->matrix.data);
  reads.stride = reads.bytes = rows * (other != nullptr ? other : &w)->matrix.row_bytes;
  return reads;
}

}  // namespace millrace::cpu
