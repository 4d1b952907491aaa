// What the reference executor makes of the descriptions of operations (backend.h): arguments of
// kernels/reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

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

inline void softcap(float cap, std::span<float> values) {
  if (cap == 0.0f) return;
  for (float& x : values) x = static_cast<float>(cap * std::tanh(static_cast<double>(x) / cap));
}

inline reference::FeedForward::Activation activation_of(Activation activation) {
  using enum reference::FeedForward::Activation;
  switch (activation) {
    case Activation::kSilu:
      return kSilu;
    case Activation::kClampedSwiglu:
      return kClampedSwiglu;
    case Activation::kGelu:
      return kGelu;
    case Activation::kGeluTanh:
      return kGeluTanh;
    case Activation::kReluSquared:
      break;
  }
  return kReluSquared;
}

// Without a gate, `up` is in its place.
inline reference::FeedForward feed_forward_of(const Linear& gate, const Linear& up, const Linear& down,
                                              Activation activation) {
  if (gate.weight == nullptr) return {linear_of(up), {}, linear_of(down), activation_of(activation)};
  return {linear_of(gate), linear_of(up), linear_of(down), activation_of(activation)};
}

}  // namespace millrace
