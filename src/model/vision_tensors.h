// Tensors of vision towers: found by name, checked, and as float32 where the host computes with them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "tensor/tensor_view.h"

namespace millrace {

// `shape`: slowest first; a convolution's counts as a matrix, [out, all the rest]. Throws Error{kBadInput}
// where there is no such tensor or another shape.
TensorView require_tensor(const io::Checkpoint& checkpoint, const std::string& name,
                          const std::vector<int64_t>& shape);
// Rows [first, first + count) of a matrix, elements of a vector.
TensorView part_of(const TensorView& view, int64_t first, int64_t count);
std::vector<float> floats_of(const TensorView& view);
// y += x * row, of `count` values.
void add_scaled(float* y, float x, const float* row, int64_t count);

}  // namespace millrace
