#include "backend/cpu/weight.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "kernels/cpu/matmul/interleave_rows.h"
#include "kernels/quant/codec.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kPackFours = 16;  // a thread packs at a time

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

struct Packing {
  Format format;
  void (*block)(const uint8_t* const* rows, uint8_t* to);
};
std::optional<Packing> packing_of(DType type) {
  if (type == DType::kQ4_K) return Packing{Format::kInterleavedQ4_K, interleave_block_q4_k};
  if (type == DType::kQ5_K) return Packing{Format::kInterleavedQ5_K, interleave_block_q5_k};
  if (type == DType::kQ6_K) return Packing{Format::kInterleavedQ6_K, interleave_block_q6_k};
  return std::nullopt;
}

int64_t packed_row_bytes(const TensorView& view) {
  return static_cast<int64_t>(bytes_of(view.type, view.cols()));
}

// All experts' rows by fours; the last is repeated where rows are missing.
void pack(const TensorView& view, CpuWeight& weight, ThreadPool& pool) {
  const Packing packing = *packing_of(view.type);
  const int64_t rows = view.rows(), row_bytes = packed_row_bytes(view), fours = (rows + 3) / 4;
  const int64_t blocks = view.cols() / info(view.type).block_elements, block_bytes = row_bytes / blocks;
  weight.packed = std::make_unique<Pages>(static_cast<size_t>(4 * fours * row_bytes), "packed weights");
  const auto* from = reinterpret_cast<const uint8_t*>(view.data);
  uint8_t* const to = weight.packed->data();
  pool.parallel_for(fours, kPackFours, [&](int64_t begin, int64_t end, int) {
    for (int64_t four = begin; four < end; ++four) {
      for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* at[4];
        for (int64_t r = 0; r < 4; ++r) {
          at[r] = from + std::min(4 * four + r, rows - 1) * view.row_stride_bytes + b * block_bytes;
        }
        packing.block(at, to + 4 * (four * row_bytes + b * block_bytes));
      }
    }
  });
  weight.format = packing.format;
  weight.matrix = {to, row_bytes, nullptr, 0, view.cols()};
}

}  // namespace

size_t held_bytes(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t room) {
  if (use == WeightUse::kVector) return static_cast<size_t>(view.elements()) * sizeof(float);
  if (use == WeightUse::kLookup) return 0;
  const std::optional<Packing> packing = packing_of(view.type);
  if (!packing || kernels.matmul[static_cast<int>(packing->format)] == nullptr) return 0;
  const auto bytes = static_cast<size_t>((view.rows() + 3) / 4 * 4 * packed_row_bytes(view));
  return bytes <= room ? bytes : 0;
}

WeightPtr load(const TensorView& view, WeightUse use, const KernelTable& kernels, size_t room,
               ThreadPool& pool) {
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
  if (use != WeightUse::kVector && held_bytes(view, use, kernels, room) > 0) {
    pack(view, *weight, pool);
    weight->copied = use == WeightUse::kMatrix;  // rows of an embedding are looked up where they lie
  }
  if (use == WeightUse::kVector) {
    weight->values.resize(static_cast<size_t>(view.elements()));
    for (int64_t r = 0; r < view.rows(); ++r) {
      quant::dequantize_row(view, r, weight->values.data() + r * view.cols());
    }
  }
  return weight;
}

}  // namespace millrace::cpu
