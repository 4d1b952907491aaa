#include "kernels/cpu/matmul/weight_matrix.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "base/error.h"
#include "kernels/cpu/matmul/interleave_rows.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kGroupsPerTask = 16;  // of interleaved rows, that a thread makes at a time
constexpr int64_t kMostInterleaved = 16;

std::optional<Format> format_of(DType type) {
  switch (type) {
    case DType::kF32:
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
    case DType::kIQ4_NL:
      return Format::kIQ4_NL;
    case DType::kIQ4_XS:
      return Format::kIQ4_XS;
    case DType::kQ3_K:
      return Format::kQ3_K;
    case DType::kQ2_K:
      return Format::kQ2_K;
    // Without kernels of their own: dequantized to float32.
    case DType::kF8E4M3:
    case DType::kIQ3_XXS:
    case DType::kIQ3_S:
    case DType::kIQ2_XXS:
    case DType::kIQ2_XS:
    case DType::kIQ2_S:
    case DType::kIQ1_S:
    case DType::kIQ1_M:
    case DType::kTQ1_0:
    case DType::kTQ2_0:
    case DType::kNVFP4:
      return Format::kF32;
    case DType::kI32:
    case DType::kU8:
      break;
  }
  return std::nullopt;
}

std::optional<InterleavedLayout> layout_of(DType type, const KernelTable& kernels) {
  const std::optional<Format> format = format_of(type);
  if (!format || kernels.interleaved_rows == 0) return std::nullopt;
  const auto layout = interleaved_layout(*format, kernels.interleaved_rows);
  return layout && kernels.matmul[static_cast<int>(layout->format)] != nullptr ? layout : std::nullopt;
}

int64_t whole_row_bytes(const TensorView& view) {
  return static_cast<int64_t>(bytes_of(view.type, view.cols()));
}

}  // namespace

WeightMatrix weight_matrix(const TensorView& view) {
  const std::optional<Format> format = format_of(view.type);
  if (!format) {
    throw_error(ErrorCode::kUnsupported, "{}: type is {}, which the cpu backend cannot multiply", view.name,
                info(view.type).name);
  }
  if (view.cols() % info(view.type).block_elements != 0) {
    throw_error(ErrorCode::kBadInput, "{}: rows of {} elements, expected a multiple of {} for {}", view.name,
                view.cols(), info(view.type).block_elements, info(view.type).name);
  }
  // Scales of kMXFP4Split: [.., out, in / 32] with one row of scales per row of the matrix.
  if (view.type == DType::kMXFP4Split && (view.scales.data == nullptr || view.scales.rows_per_scale != 1 ||
                                          view.scales.cols_per_scale != kQuantBlock)) {
    throw_error(ErrorCode::kUnsupported, "{}: scales of {} x {} elements, expected 1 x {}", view.name,
                view.scales.rows_per_scale, view.scales.cols_per_scale, kQuantBlock);
  }
  WeightMatrix weight;
  weight.view = view;
  weight.experts = view.rank == 3 ? view.shape[0] : 1;
  weight.cols = view.cols();
  weight.rows = weight.experts == 0 ? 0 : view.rows() / weight.experts;
  weight.expert_rows = view.matrix_rows == 0 ? weight.rows : view.matrix_rows;
  // A factor beside a type that has scales of its own, as NVFP4 files have: only the codec knows it.
  const bool with_factor = view.scales.data != nullptr && view.type != DType::kMXFP4Split;
  weight.format = with_factor ? Format::kF32 : *format;
  weight.dequantized = weight.format == Format::kF32 && (with_factor || view.type != DType::kF32);
  weight.matrix = {reinterpret_cast<const uint8_t*>(view.data), view.row_stride_bytes,
                   reinterpret_cast<const uint8_t*>(view.scales.data), view.scales.scales_per_row,
                   view.cols()};
  return weight;
}

size_t interleaved_bytes(const TensorView& view, const KernelTable& kernels) {
  if (view.scales.data != nullptr || !layout_of(view.type, kernels)) return 0;
  const int64_t together = kernels.interleaved_rows;
  return static_cast<size_t>((view.rows() + together - 1) / together * together * whole_row_bytes(view));
}

// The last row is repeated where rows are missing.
WeightMatrix interleave(const TensorView& view, const KernelTable& kernels, uint8_t* to, ThreadPool& pool) {
  WeightMatrix weight = weight_matrix(view);
  const InterleavedLayout layout = *layout_of(view.type, kernels);
  const int64_t rows = view.rows(), row_bytes = whole_row_bytes(view), together = kernels.interleaved_rows;
  const int64_t blocks = view.cols() / info(view.type).block_elements, block_bytes = row_bytes / blocks;
  const auto* from = reinterpret_cast<const uint8_t*>(view.data);
  MILLRACE_CHECK(together <= kMostInterleaved);
  pool.parallel_for((rows + together - 1) / together, kGroupsPerTask, [&](int64_t begin, int64_t end, int) {
    const uint8_t* at[kMostInterleaved];
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t r = 0; r < together; ++r) {
        at[r] = from + view.data_row(std::min(together * group + r, rows - 1)) * view.row_stride_bytes;
      }
      for (int64_t b = 0; b < blocks; ++b) {
        interleave_block(layout, at, together, to + together * (group * row_bytes + b * block_bytes));
        for (int64_t r = 0; r < together; ++r) at[r] += block_bytes;
      }
    }
  });
  weight.format = layout.format;
  weight.matrix = {to, row_bytes, nullptr, 0, view.cols()};
  weight.expert_rows = weight.rows;
  return weight;
}

}  // namespace millrace::cpu
