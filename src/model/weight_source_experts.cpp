// Experts of Hugging Face directories: one tensor for all of them, in floats or MXFP4 blocks, or one for
// each, seen as or gathered to [experts, rows, cols].
#include <fmt/format.h>

#include <cstring>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/weight_source.h"

namespace millrace {

std::optional<TensorView> WeightSource::find_experts(int layer, const WeightSpec& spec) {
  const bool bias = spec.role.ends_with(".bias");
  const HfExperts& experts = *spec.experts;
  if (experts.fused.empty()) {
    if (bias) return std::nullopt;
    std::optional<TensorView> found;
    if (!experts.single.empty()) found = gather_single(layer, spec);
    return found || experts.stacked.empty() ? found : gather_stacked(layer, spec);
  }
  if (bias) return find_fused_bias(layer, experts);
  if (std::optional<TensorView> found = find_fused_blocks(layer, experts)) return found;
  const TensorView* fused = checkpoint_.find_tensor(expert_name(layer, experts, experts.fused));
  return fused == nullptr ? std::nullopt : std::optional(gather_transposed(*fused, experts));
}

// [experts, rows] of which every row_step-th is this one's: seen as [experts, rows, 1] with a stride between
// rows.
std::optional<TensorView> WeightSource::find_fused_bias(int layer, const HfExperts& experts) const {
  const TensorView* bias = checkpoint_.find_tensor(expert_name(layer, experts, experts.fused) + "_bias");
  if (bias == nullptr || bias->rank != 2 || bias->shape[1] % experts.row_step != 0) return std::nullopt;
  TensorView view = *bias;
  set_shape(view, {bias->shape[0], bias->shape[1] / experts.row_step, 1});
  const int64_t element = info(bias->type).block_bytes;
  view.data += experts.first_row * element;
  view.row_stride_bytes = experts.row_step * element;
  return view;
}

// MXFP4: blocks [experts, rows, cols / 32, 16] and scales [experts, rows, cols / 32]; where a tensor holds
// two matrices' rows in turn, each is seen through a doubled row stride.
std::optional<TensorView> WeightSource::find_fused_blocks(int layer, const HfExperts& experts) const {
  const std::string base = expert_name(layer, experts, experts.fused);
  const TensorView* blocks = checkpoint_.find_tensor(base + "_blocks");
  const TensorView* scales = checkpoint_.find_tensor(base + "_scales");
  if (blocks == nullptr) return std::nullopt;
  if (scales == nullptr || blocks->rank != 4 || scales->rank != 3 || blocks->type != DType::kU8 ||
      scales->type != DType::kU8 || blocks->shape[3] != 16 || blocks->shape[1] % experts.row_step != 0 ||
      !std::equal(scales->shape.begin(), scales->shape.begin() + 3, blocks->shape.begin())) {
    throw_error(ErrorCode::kBadInput,
                "{}: {}_blocks and _scales: found {} and {}, expected u8 [experts, rows, cols/32, 16] and "
                "the same without the 16",
                checkpoint_.path(), base,
                shape_text({blocks->shape.data(), static_cast<size_t>(blocks->rank)}),
                scales == nullptr ? "no scales"
                                  : shape_text({scales->shape.data(), static_cast<size_t>(scales->rank)}));
  }
  const int64_t groups = blocks->shape[2];  // per row
  TensorView view = *blocks;
  view.type = DType::kMXFP4Split;
  set_shape(view, {blocks->shape[0], blocks->shape[1] / experts.row_step, groups * 32});
  view.data += experts.first_row * groups * 16;
  view.row_stride_bytes = experts.row_step * groups * 16;
  view.scales = {.data = scales->data + experts.first_row * groups,
                 .type = DType::kU8,
                 .rows_per_scale = 1,
                 .cols_per_scale = 32,
                 .scales_per_row = experts.row_step * groups};
  return view;
}

// One tensor per expert; backends want one [experts, rows, cols].
std::optional<TensorView> WeightSource::gather_single(int layer, const WeightSpec& spec) {
  std::vector<Stored> stored;
  std::vector<TensorView> parts;
  for (int32_t i = 0; i < config_.experts; ++i) {
    const std::string name =
        expert_name(layer, *spec.experts, fmt::format("{}.{}.weight", i, spec.experts->single));
    std::optional<Stored> part = find_stored(name, spec.shape[1], spec.shape[2]);
    if (!part && i == 0) return std::nullopt;
    if (!part)
      throw_error(ErrorCode::kBadInput, "{}: tensor {}: found nothing, expected one per expert",
                  checkpoint_.path(), name);
    stored.push_back(std::move(*part));
    parts.push_back(stored.back().view);
    const TensorView &now = parts.back(), &first = parts.front();
    const ScaleGrid &a = now.scales, &b = first.scales;
    const bool packed = stored.back().packed != nullptr;
    if (now.rank != 2 || now.shape != first.shape || (now.type != first.type && !packed) ||
        packed != (stored.front().packed != nullptr) || (a.data == nullptr) != (b.data == nullptr) ||
        a.type != b.type || a.rows_per_scale != b.rows_per_scale || a.cols_per_scale != b.cols_per_scale ||
        (a.data != nullptr && first.shape[0] % a.rows_per_scale != 0 && config_.experts > 1)) {
      throw_error(ErrorCode::kBadInput,
                  "{}: tensor {}: found another shape, type or scale grid than expert 0's, expected the same",
                  checkpoint_.path(), name);
    }
  }
  if (stored.front().packed != nullptr) return gather_packed(stored);
  TensorView view = parts.front();
  set_shape(view, {config_.experts, parts[0].shape[0], parts[0].shape[1]});
  const size_t part_bytes = parts[0].bytes();
  const int64_t grid_rows = view.scales.data == nullptr ? 0 : parts[0].shape[0] / view.scales.rows_per_scale;
  const size_t grid_bytes = bytes_of(view.scales.type, grid_rows * view.scales.scales_per_row);
  std::byte* to = own_experts(config_.experts, part_bytes);
  std::byte* grid_to = grid_bytes == 0 ? nullptr : own_experts(config_.experts, grid_bytes);
  view.data = to;
  if (grid_bytes != 0) view.scales.data = grid_to;
  if (!gather_) return view;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!wants(static_cast<int64_t>(i))) continue;
    std::memcpy(to + i * part_bytes, parts[i].data, part_bytes);
    if (grid_bytes != 0) std::memcpy(grid_to + i * grid_bytes, parts[i].scales.data, grid_bytes);
  }
  return view;
}

// In one type for all; where experts differ in the one that holds them, in float32, which holds any.
TensorView WeightSource::gather_packed(const std::vector<Stored>& parts) {
  TensorView view = parts.front().view;
  for (const Stored& part : parts) {
    if (part.view.type != view.type) view.type = DType::kF32;
  }
  const int64_t rows = view.rows(), cols = view.cols();
  set_shape(view, {static_cast<int64_t>(parts.size()), rows, cols});
  view.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, cols));
  ++unpacked_[{parts.front().scheme, view.type}];
  const size_t part_bytes = static_cast<size_t>(rows) * bytes_of(view.type, cols);
  std::byte* to = own_experts(std::ssize(parts), part_bytes);
  view.data = to;
  if (!gather_) return view;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (wants(static_cast<int64_t>(i))) unpack(parts[i], view.type, to + i * part_bytes);
  }
  return view;
}

// Some of the rows of every expert of [experts, all rows, cols].
std::optional<TensorView> WeightSource::gather_stacked(int layer, const WeightSpec& spec) {
  const HfExperts& experts = *spec.experts;
  const std::string name = fmt::format("{}{}.{}", architecture_.hf_names().layers, layer, experts.stacked);
  const TensorView* all = checkpoint_.find_tensor(name);
  if (all == nullptr) return std::nullopt;
  const int64_t rows = spec.shape[1], cols = spec.shape[2];
  const bool plain = all->rank == 3 && all->shape[1] == rows * experts.parts && all->shape[2] == cols;
  if (!plain && all->rank == 3 && all->shape[1] == cols && all->shape[2] == rows * experts.parts) {
    return gather_transposed(*all, experts);  // as Qwen 3 VL's are published
  }
  if (all->rank != 3 || info(all->type).block_elements != 1 || all->type == DType::kF8E4M3 ||
      all->shape[1] != rows * experts.parts) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {} {}, expected floats [experts, {}, cols]",
                checkpoint_.path(), name, info(all->type).name,
                shape_text({all->shape.data(), static_cast<size_t>(all->rank)}), rows * experts.parts);
  }
  TensorView view = *all;
  set_shape(view, {all->shape[0], rows, all->shape[2]});
  if (experts.parts == 1) return view;
  const auto row_bytes = static_cast<size_t>(all->row_stride_bytes);
  const size_t bytes = static_cast<size_t>(rows) * row_bytes;
  std::byte* to = own_experts(all->shape[0], bytes);
  view.data = to;
  if (!gather_) return view;
  for (int64_t e = 0; e < all->shape[0]; ++e, to += bytes) {
    if (!wants(e)) continue;
    std::memcpy(to, all->data + static_cast<size_t>(e * all->shape[1] + experts.first_row) * row_bytes,
                bytes);
  }
  return view;
}

// Floats [experts, cols, rows], used as x W. Turned into [experts, rows, cols].
TensorView WeightSource::gather_transposed(const TensorView& fused, const HfExperts& experts) {
  const int64_t parts = experts.parts * experts.row_step;
  if (fused.rank != 3 || info(fused.type).block_elements != 1 || fused.shape[2] % parts != 0) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found {} of rank {}, expected floats [experts, cols, rows]",
                checkpoint_.path(), fused.name, info(fused.type).name, fused.rank);
  }
  const int64_t num_experts = fused.shape[0], cols = fused.shape[1], rows = fused.shape[2] / parts;
  const size_t element = static_cast<size_t>(info(fused.type).block_bytes);
  TensorView view = fused;
  set_shape(view, {num_experts, rows, cols});
  view.row_stride_bytes = static_cast<int64_t>(element) * cols;
  const size_t part_bytes = element * static_cast<size_t>(rows * cols);
  std::byte* const all = own_experts(num_experts, part_bytes);
  view.data = all;
  if (!gather_) return view;
  for (int64_t x = 0; x < num_experts; ++x) {
    if (!wants(x)) continue;
    std::byte* to = all + static_cast<size_t>(x) * part_bytes;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c, to += element) {
        std::memcpy(to,
                    fused.data + element * ((x * cols + c) * fused.shape[2] + experts.first_row +
                                            r * experts.row_step),
                    element);
      }
    }
  }
  return view;
}

}  // namespace millrace
