// What the reference executor makes of the descriptions of operations (backend.h): arguments of
// kernels/reference.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/backend.h"
#include "backend/reference/reference_executor.h"
#include "kernels/reference/naive_linear.h"
#include "kernels/reference/naive_moe.h"
#include "kernels/reference/naive_norm.h"

namespace millrace {

inline const ReferenceWeight& own(const Weight& weight) {
  return static_cast<const ReferenceWeight&>(weight);
}

inline const float* values_of(const Weight* vector) {
  return vector == nullptr ? nullptr : own(*vector).values.data();
}

inline reference::LinearWeights linear_of(const Linear& op) {
  return {&own(*op.weight).view, values_of(op.bias)};
}

inline void norm(const Norm& op, const float* x, int64_t size, float* y) {
  if (!op.present()) {
    std::copy_n(x, size, y);
  } else if (op.kind == Norm::Kind::kLayer) {
    reference::layernorm(x, values_of(op.weight), values_of(op.bias), op.eps, size, y);
  } else {
    reference::rmsnorm(x, values_of(op.weight), op.eps, size, y);
  }
}

// Without a gate, `up` is in its place.
inline reference::FeedForward feed_forward_of(const Linear& gate, const Linear& up, const Linear& down,
                                              Activation activation) {
  if (gate.weight == nullptr) return {linear_of(up), {}, linear_of(down), activation};
  return {linear_of(gate), linear_of(up), linear_of(down), activation};
}

}  // namespace millrace
