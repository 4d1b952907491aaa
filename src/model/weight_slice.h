// Which part of a weight a rank of tensor parallelism holds: output rows of matrices and of their biases,
// heads of what makes queries, keys and values, whole experts where shares say so, and all of what is small
// or looked up.
#pragma once

#include <string_view>

#include "dist/shares.h"
#include "model/config.h"
#include "tensor/tensor_view.h"

namespace millrace {

// The rank's part of the weight of this role (WeightSpec::role), where it lies. Throws Error{kUnsupported}
// for a role without a rule.
TensorView slice_weight(const TensorView& view, std::string_view role, const ModelConfig& config,
                        const dist::Shares& shares);

// Is it one of every expert's, [experts, ...]?
bool is_of_experts(std::string_view role);

}  // namespace millrace
