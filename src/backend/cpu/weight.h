// A weight as the cpu backend holds it: matrices where they lie in the file, or copied into huge pages, with
// a few rows interleaved where the table has kernels for that; vectors as float32.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/memory.h"
#include "kernels/cpu/matmul/gate_up.h"
#include "kernels/cpu/matmul/weight_matrix.h"
#include "kernels/cpu/norm/norm.h"

namespace millrace::cpu {

struct CpuWeight final : Weight {
  WeightMatrix matrix;
  std::vector<float> values;    // of a vector
  std::shared_ptr<Pages> copy;  // what `matrix` points to, if it was copied
};

inline const CpuWeight& own(const Weight& weight) { return static_cast<const CpuWeight&>(weight); }
inline const float* values_of(const Weight* vector) {
  return vector == nullptr ? nullptr : own(*vector).values.data();
}
inline LinearWeights linear_of(const Linear& op) { return {&own(*op.weight).matrix, values_of(op.bias)}; }
// Without a gate, `up` is in its place.
inline GateUp gate_up_of(const Linear& gate, const Linear& up, Activation activation) {
  if (gate.weight == nullptr) return {linear_of(up), {}, activation};
  return {linear_of(gate), linear_of(up), activation};
}

NormWeights weights_of(const Norm& op);

// Bytes that copies of matrices may take: interleaved ones, and others.
struct CopyLimits {
  size_t interleaved = 0, plain = 0;
};
// Bytes beyond the mapping: of a vector, or of a matrix that is copied.
size_t held_bytes(const TensorView& view, WeightUse use, const KernelTable& kernels,
                  const CopyLimits& limits);
WeightPtr load(const TensorView& view, WeightUse use, const KernelTable& kernels, const CopyLimits& limits,
               ThreadPool& pool, CopyMemory& memory);

}  // namespace millrace::cpu
