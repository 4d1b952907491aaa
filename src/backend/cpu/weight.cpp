#include "backend/cpu/weight.h"

#include "kernels/quant/codec.h"

namespace millrace::cpu {

size_t held_bytes(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t max_bytes) {
  if (use == WeightUse::kVector) return static_cast<size_t>(view.elements()) * sizeof(float);
  if (use == WeightUse::kLookup) return 0;
  const size_t bytes = interleaved_bytes(view, kernels);
  return bytes <= max_bytes ? bytes : 0;
}

WeightPtr load(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t max_bytes,
               ThreadPool& pool) {
  auto weight = std::make_unique<CpuWeight>();
  weight->matrix = weight_matrix(view);
  weight->experts = weight->matrix.experts;
  weight->rows = weight->matrix.rows;
  weight->cols = weight->matrix.cols;
  if (use == WeightUse::kVector) {
    weight->values.resize(static_cast<size_t>(view.elements()));
    for (int64_t r = 0; r < view.rows(); ++r) {
      quant::dequantize_row(view, r, weight->values.data() + r * view.cols());
    }
  } else if (const size_t bytes = held_bytes(view, use, kernels, max_bytes); bytes > 0) {
    weight->interleaved = std::make_unique<Pages>(bytes, "interleaved weights");
    weight->matrix = interleave(view, weight->interleaved->data(), pool);
    weight->copied = use == WeightUse::kMatrix;  // rows of an embedding are looked up where they lie
  }
  return weight;
}

NormWeights weights_of(const Norm& op) {
  const auto kind = !op.present()                   ? NormWeights::Kind::kNone
                    : op.kind == Norm::Kind::kLayer ? NormWeights::Kind::kLayer
                                                    : NormWeights::Kind::kRms;
  return {values_of(op.weight), op.eps, values_of(op.bias), kind};
}

}  // namespace millrace::cpu
