// A weight as the cpu backend holds it: matrices where they lie in the file, vectors as float32.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernel_table.h"

namespace millrace::cpu {

struct CpuWeight final : Weight {
  TensorView view;
  MatrixView matrix{};           // all experts' rows, one after the other
  Format format = Format::kF32;  // of a matrix
  bool decoded = false;          // FP8: opened to float32 a few rows at a time, then format is kF32
  std::vector<float> values;     // of a vector
};

inline const CpuWeight& own(const Weight& weight) { return static_cast<const CpuWeight&>(weight); }

// Bytes beyond the mapping. Matrices of every type are used where they lie.
size_t held_bytes(const TensorView& view, WeightUse use);
WeightPtr load(const TensorView& view, WeightUse use);

}  // namespace millrace::cpu
