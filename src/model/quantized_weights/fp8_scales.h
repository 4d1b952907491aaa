// FP8 weights keep their name and type and have their scales in a tensor beside them: per tensor, per row or
// in a grid of patches.
#pragma once

#include <string>

#include "io/checkpoint.h"
#include "tensor/tensor_view.h"

namespace millrace {

struct Fp8Scales {
  ScaleGrid grid;     // as the view wants it, but for `data` where the type is to be widened
  int64_t count = 0;  // of all
  const std::byte* stored = nullptr;
  DType stored_type = DType::kF32;  // kF32 and kBF16 stay where they are; kF16 becomes kF32
};

// X.weight_scale_inv or X.weight_scale of `view`, an f8_e4m3 matrix called "X.weight". Throws
// Error{kBadInput} where there is none or it does not cover the matrix.
Fp8Scales find_fp8_scales(const io::Checkpoint& checkpoint, const TensorView& view);

}  // namespace millrace
