// A weight as the cpu backend holds it: matrices where they lie in the file, or packed by fours of rows where
// the table has kernels for that; vectors as float32.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/memory.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

struct CpuWeight final : Weight {
  TensorView view;
  MatrixView matrix{};            // all experts' rows, one after the other
  Format format = Format::kF32;   // of a matrix
  bool decoded = false;           // FP8: opened to float32 a few rows at a time, then format is kF32
  std::vector<float> values;      // of a vector
  std::unique_ptr<Pages> packed;  // what `matrix` points to, if it was packed
};

inline const CpuWeight& own(const Weight& weight) { return static_cast<const CpuWeight&>(weight); }

// Bytes beyond the mapping: of a vector, or of a matrix that is packed if `room` bytes hold it.
size_t held_bytes(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t room);
WeightPtr load(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t room,
               ThreadPool& pool);

}  // namespace millrace::cpu
