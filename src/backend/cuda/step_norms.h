// How the launches of a step read the descriptions of backend.h: vectors, norms, activations.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/cuda_weight.h"
#include "kernels/cuda/moe/gelu.h"
#include "kernels/cuda/norm/row_norm.h"

namespace millrace::cuda {

inline const float* vector_of(const Weight* weight) {
  return weight != nullptr ? own(*weight).vector() : nullptr;
}

// RMSNorm with a weight: what the products and the router do themselves.
inline bool is_plain(const Norm& op) { return op.kind == Norm::Kind::kRms && op.weight != nullptr; }

inline RowNorm row_norm_of(const Norm& op, const float* x, int64_t rows, int64_t size, float* y) {
  RowNorm norm;
  norm.kind = !op.present()                   ? NormKind::kNone
              : op.kind == Norm::Kind::kLayer ? NormKind::kLayer
                                              : NormKind::kRms;
  norm.x = x;
  norm.weight = vector_of(op.weight);
  norm.bias = op.kind == Norm::Kind::kLayer ? vector_of(op.bias) : nullptr;
  norm.eps = op.eps;
  norm.rows = rows;
  norm.size = size;
  norm.y = y;
  return norm;
}

inline ActivationKind kind_of(millrace::Activation activation) {
  return activation == millrace::Activation::kGelu          ? ActivationKind::kGelu
         : activation == millrace::Activation::kGeluTanh    ? ActivationKind::kGeluTanh
         : activation == millrace::Activation::kReluSquared ? ActivationKind::kReluSquared
                                                            : ActivationKind::kSilu;
}

// What products have in their epilogues; the others go over the values once more.
inline bool in_epilogues(millrace::Activation activation) {
  return activation == millrace::Activation::kSilu || activation == millrace::Activation::kClampedSwiglu;
}

}  // namespace millrace::cuda
