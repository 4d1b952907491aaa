// A weight as the cpu backend holds it: matrices where they lie in the file, or with four rows interleaved
// where the table has kernels for that; vectors as float32.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/memory.h"
#include "kernels/cpu/matmul/weight_matrix.h"
#include "kernels/cpu/norm/norm.h"

namespace millrace::cpu {

struct CpuWeight final : Weight {
  WeightMatrix matrix;
  std::vector<float> values;           // of a vector
  std::unique_ptr<Pages> interleaved;  // what `matrix` points to, if its rows were interleaved
};

inline const CpuWeight& own(const Weight& weight) { return static_cast<const CpuWeight&>(weight); }
inline const float* values_of(const Weight* vector) {
  return vector == nullptr ? nullptr : own(*vector).values.data();
}
inline LinearWeights linear_of(const Linear& op) { return {&own(*op.weight).matrix, values_of(op.bias)}; }

NormWeights weights_of(const Norm& op);

// Bytes beyond the mapping: of a vector, or of a matrix that is interleaved if it takes at most max_bytes.
size_t held_bytes(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t max_bytes);
WeightPtr load(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t max_bytes,
               ThreadPool& pool);

}  // namespace millrace::cpu
