#include "backend/cpu/weight.h"

#include <optional>

#include "base/error.h"
#include "quant/codec.h"

namespace millrace::cpu {
namespace {

std::optional<Format> format_of(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kF8E4M3:
      return Format::kF32;
    case DType::kF16:
      return Format::kF16;
    case DType::kBF16:
      return Format::kBF16;
    case DType::kQ8_0:
      return Format::kQ8_0;
    case DType::kQ4_0:
      return Format::kQ4_0;
    case DType::kQ4_1:
      return Format::kQ4_1;
    case DType::kQ5_0:
      return Format::kQ5_0;
    case DType::kQ5_1:
      return Format::kQ5_1;
    case DType::kQ4_K:
      return Format::kQ4_K;
    case DType::kQ5_K:
      return Format::kQ5_K;
    case DType::kQ6_K:
      return Format::kQ6_K;
    case DType::kMXFP4:
      return Format::kMXFP4;
    case DType::kMXFP4Split:
      return Format::kMXFP4Split;
    case DType::kQ4_Z:
      return Format::kQ4_Z;
    case DType::kI32:
    case DType::kU8:
      break;
  }
  return std::nullopt;
}

}  // namespace

size_t held_bytes(const TensorView& view, WeightUse use) {
  return use == WeightUse::kVector ? static_cast<size_t>(view.elements()) * sizeof(float) : 0;
}

WeightPtr load(const TensorView& view, WeightUse use) {
  const std::optional<Format> format = format_of(view.type);
  if (!format) {
    throw_error(ErrorCode::kUnsupported, "{}: type is {}, which the cpu backend cannot multiply", view.name,
                info(view.type).name);
  }
  if (view.cols() % info(view.type).block_elements != 0) {
    throw_error(ErrorCode::kBadInput, "{}: rows of {} elements, expected a multiple of {} for {}", view.name,
                view.cols(), info(view.type).block_elements, info(view.type).name);
  }
  auto weight = std::make_unique<CpuWeight>();
  weight->view = view;
  weight->experts = view.rank == 3 ? view.shape[0] : 1;
  weight->cols = view.cols();
  weight->rows = weight->experts == 0 ? 0 : view.rows() / weight->experts;
  weight->format = *format;
  weight->decoded = view.type == DType::kF8E4M3;
  // Scales of kMXFP4Split: [.., out, in / 32] with one row of scales per row of the matrix.
  if (view.type == DType::kMXFP4Split && (view.scales.data == nullptr || view.scales.rows_per_scale != 1 ||
                                          view.scales.cols_per_scale != kQuantBlock)) {
    throw_error(ErrorCode::kUnsupported, "{}: scales of {} x {} elements, expected 1 x {}", view.name,
                view.scales.rows_per_scale, view.scales.cols_per_scale, kQuantBlock);
  }
  weight->matrix = {reinterpret_cast<const uint8_t*>(view.data), view.row_stride_bytes,
                    reinterpret_cast<const uint8_t*>(view.scales.data), view.scales.scales_per_row,
                    view.cols()};
  if (use == WeightUse::kVector) {
    weight->values.resize(static_cast<size_t>(view.elements()));
    for (int64_t r = 0; r < view.rows(); ++r) {
      quant::dequantize_row(view, r, weight->values.data() + r * view.cols());
    }
  }
  return weight;
}

}  // namespace millrace::cpu
