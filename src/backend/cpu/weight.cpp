#include "backend/cpu/weight.h"

#include <cstring>

#include "kernels/quant/codec.h"

namespace millrace::cpu {

namespace {

// A file's pages are small ones: on a virtual machine a matrix in 2 MiB pages was read 1.4 times as fast. Of
// matrices that kernels read where they lie.
size_t plain_bytes(const TensorView& view) {
  const WeightMatrix matrix = weight_matrix(view);
  if (matrix.dequantized || matrix.matrix.scales != nullptr) return 0;
  return static_cast<size_t>(view.rows()) * bytes_of(view.type, view.cols());
}

struct Held {
  size_t bytes = 0;
  bool interleaved = false;
};
Held held_copy(const TensorView& view, WeightUse use, const KernelTable& kernels, const CopyLimits& limits) {
  if (use == WeightUse::kVector || use == WeightUse::kLookup) return {};
  if (const size_t bytes = interleaved_bytes(view, kernels); bytes > 0) {
    return bytes <= limits.interleaved ? Held{bytes, true} : Held{};
  }
  if (limits.plain == 0) return {};
  const size_t bytes = plain_bytes(view);
  return bytes <= limits.plain ? Held{bytes, false} : Held{};
}

void copy_rows(const TensorView& view, uint8_t* to, ThreadPool& pool) {
  const size_t row_bytes = bytes_of(view.type, view.cols());
  pool.parallel_for(view.rows(), 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(to + static_cast<size_t>(r) * row_bytes, view.row(r), row_bytes);
    }
  });
}

}  // namespace

size_t held_bytes(const TensorView& view, WeightUse use, const KernelTable& kernels,
                  const CopyLimits& limits) {
  if (use == WeightUse::kVector) return static_cast<size_t>(view.elements()) * sizeof(float);
  return held_copy(view, use, kernels, limits).bytes;
}

WeightPtr load(const TensorView& view, WeightUse use, const KernelTable& kernels, const CopyLimits& limits,
               ThreadPool& pool, CopyMemory& memory) {
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
    return weight;
  }
  const Held held = held_copy(view, use, kernels, limits);
  if (held.bytes == 0) return weight;
  weight->copied = use == WeightUse::kMatrix;  // rows of an embedding are looked up where they lie
  const CopyMemory::Piece piece = memory.take(held.bytes);
  weight->copy = piece.pages;
  if (held.interleaved) {
    weight->matrix = interleave(view, kernels, piece.data, pool);
    return weight;
  }
  copy_rows(view, piece.data, pool);
  weight->matrix.matrix.data = piece.data;
  weight->matrix.matrix.row_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
  weight->matrix.expert_rows = weight->matrix.rows;
  return weight;
}

NormWeights weights_of(const Norm& op) {
  const auto kind = !op.present()                   ? NormWeights::Kind::kNone
                    : op.kind == Norm::Kind::kLayer ? NormWeights::Kind::kLayer
                                                    : NormWeights::Kind::kRms;
  return {values_of(op.weight), op.eps, values_of(op.bias), kind};
}

}  // namespace millrace::cpu
