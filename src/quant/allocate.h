// A type for each tensor under a budget of bytes: the choice of least total cost, found by always taking the
// step that saves most cost for its bytes.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tensor/dtype.h"

namespace millrace::quant {

struct TypeOption {
  DType type = DType::kF32;
  size_t bytes = 0;
  double cost = 0.0;  // what using it does to the output; any unit that adds up
};

// Which option each tensor takes (an index into its options). Every tensor has at least one. The smallest
// choice is given even where it passes the budget: callers compare least_bytes() first.
std::vector<size_t> allocate(std::span<const std::vector<TypeOption>> tensors, size_t budget);
size_t least_bytes(std::span<const std::vector<TypeOption>> tensors);

}  // namespace millrace::quant
