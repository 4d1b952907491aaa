#include "model/weight_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "io/hf_directory.h"
#include "kernels/quant/codec.h"
#include "model/architecture.h"

namespace millrace {
namespace {

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void set_shape(TensorView& view, std::initializer_list<int64_t> shape) {
  view.rank = static_cast<int>(shape.size());
  view.shape = {1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
}

}  // namespace

WeightSource::WeightSource(const io::Checkpoint& checkpoint, const ModelConfig& config, bool gather)
    : checkpoint_(checkpoint), config_(config), architecture_(architecture_of(config)), gather_(gather) {}

const std::vector<WeightSpec>& WeightSource::specs(int layer) {
  const auto known = specs_.find(layer);
  if (known != specs_.end()) return known->second;
  if (layer >= 0) return specs_[layer] = architecture_.layer_weights(config_, layer);
  const HfNames hf = architecture_.hf_names();
  const std::vector<int64_t> matrix = {config_.vocab, config_.hidden};
  std::vector<WeightSpec> outside = {
      {.role = "token_embd.weight", .hf = hf.embedding, .shape = matrix, .use = WeightUse::kLookup},
      {.role = "output_norm.weight",
       .hf = hf.output_norm,
       .shape = {config_.hidden},
       .presence = hf.has_output_norm ? Presence::kRequired : Presence::kRare,
       .hf_offset = hf.norm_offset},
      {.role = "output.weight",
       .hf = hf.output,
       .shape = matrix,
       .use = WeightUse::kMatrix,
       .presence = Presence::kUsual}};
  for (WeightSpec& more : architecture_.outer_weights(config_)) outside.push_back(std::move(more));
  return specs_[layer] = std::move(outside);
}

const WeightSpec* WeightSource::spec_of(int layer, std::string_view role) {
  for (const WeightSpec& spec : specs(layer)) {
    if (spec.role == role) return &spec;
  }
  return nullptr;
}

std::byte* WeightSource::own(size_t bytes) {
  gathered_bytes_ += bytes;
  if (!gather_) return nullptr;
  gathered_.push_back(std::unique_ptr<std::byte[]>(new std::byte[bytes]));
  return gathered_.back().get();
}

std::string WeightSource::expert_name(int layer, const HfExperts& experts, std::string_view rest) const {
  return fmt::format("{}{}.{}{}", architecture_.hf_names().layers, layer, experts.before, rest);
}

std::vector<std::string> WeightSource::names_of(int layer, const WeightSpec& spec) const {
  if (checkpoint_.gguf) {
    const std::string before = layer < 0 ? "" : fmt::format("blk.{}.", layer);
    std::vector<std::string> names = {before + std::string(spec.role)};
    for (const std::string_view other : spec.gguf) {
      if (other != spec.role) names.push_back(before + std::string(other));
    }
    return names;
  }
  if (spec.experts && !spec.experts->single.empty()) {
    std::vector<std::string> names = {
        expert_name(layer, *spec.experts, fmt::format("0.{}.weight", spec.experts->single))};
    if (!spec.experts->stacked.empty())
      names.push_back(fmt::format("{}{}.{}", architecture_.hf_names().layers, layer, spec.experts->stacked));
    return names;
  }
  if (spec.experts) {
    const std::string fused = expert_name(layer, *spec.experts, spec.experts->fused);
    if (spec.role.ends_with(".bias")) return {fused + "_bias"};
    return {fused + "_blocks", fused};
  }
  if (spec.hf.empty()) return {};
  const std::string before = layer < 0 ? "" : fmt::format("{}{}.", architecture_.hf_names().layers, layer);
  return {before + std::string(spec.hf)};
}

std::optional<TensorView> WeightSource::find_plain(int layer, const WeightSpec& spec) const {
  for (const std::string& name : names_of(layer, spec)) {
    const TensorView* named = checkpoint_.find_tensor(name);
    if (named == nullptr) continue;
    TensorView view = *named;
    if (name.ends_with(".weight")) attach_scales(view, name.substr(0, name.size() - 7));
    return view;
  }
  return std::nullopt;
}

std::optional<TensorView> WeightSource::find_experts(int layer, const WeightSpec& spec) {
  const bool bias = spec.role.ends_with(".bias");
  const HfExperts& experts = *spec.experts;
  if (!experts.single.empty()) {
    if (bias) return std::nullopt;
    std::optional<TensorView> found = gather_single(layer, experts);
    return found || experts.stacked.empty() ? found : gather_stacked(layer, spec);
  }
  if (bias) return find_fused_bias(layer, experts);
  std::optional<TensorView> found = find_fused_blocks(layer, experts);
  return found ? found : gather_transposed(layer, spec);
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
std::optional<TensorView> WeightSource::gather_single(int layer, const HfExperts& experts) {
  std::vector<TensorView> parts;
  for (int32_t i = 0; i < config_.experts; ++i) {
    const std::string name = expert_name(layer, experts, fmt::format("{}.{}", i, experts.single));
    const TensorView* part = checkpoint_.find_tensor(name + ".weight");
    if (part == nullptr && i == 0) return std::nullopt;
    if (part == nullptr)
      throw_error(ErrorCode::kBadInput, "{}: tensor {}.weight: found nothing, expected one per expert",
                  checkpoint_.path(), name);
    parts.push_back(*part);
    attach_scales(parts.back(), name);
    const TensorView& first = parts.front();
    const ScaleGrid &a = parts.back().scales, &b = first.scales;
    if (part->rank != 2 || part->shape != first.shape || part->type != first.type ||
        (a.data == nullptr) != (b.data == nullptr) || a.type != b.type ||
        a.rows_per_scale != b.rows_per_scale || a.cols_per_scale != b.cols_per_scale ||
        (a.data != nullptr && first.shape[0] % a.rows_per_scale != 0 && config_.experts > 1)) {
      throw_error(
          ErrorCode::kBadInput,
          "{}: tensor {}.weight: found another shape, type or scale grid than expert 0's, expected the same",
          checkpoint_.path(), name);
    }
  }
  TensorView view = parts.front();
  set_shape(view, {config_.experts, parts[0].shape[0], parts[0].shape[1]});
  const size_t part_bytes = parts[0].bytes();
  const int64_t grid_rows = view.scales.data == nullptr ? 0 : parts[0].shape[0] / view.scales.rows_per_scale;
  const size_t grid_bytes = bytes_of(view.scales.type, grid_rows * view.scales.scales_per_row);
  std::byte* to = own(part_bytes * parts.size());
  std::byte* grid_to = grid_bytes == 0 ? nullptr : own(grid_bytes * parts.size());
  view.data = to;
  if (grid_bytes != 0) view.scales.data = grid_to;
  if (!gather_) return view;
  for (const TensorView& part : parts) {
    std::memcpy(to, part.data, part_bytes);
    to += part_bytes;
    if (grid_bytes == 0) continue;
    std::memcpy(grid_to, part.scales.data, grid_bytes);
    grid_to += grid_bytes;
  }
  return view;
}

// Some of the rows of every expert of [experts, all rows, cols].
std::optional<TensorView> WeightSource::gather_stacked(int layer, const WeightSpec& spec) {
  const HfExperts& experts = *spec.experts;
  const std::string name = fmt::format("{}{}.{}", architecture_.hf_names().layers, layer, experts.stacked);
  const TensorView* all = checkpoint_.find_tensor(name);
  if (all == nullptr) return std::nullopt;
  const int64_t rows = spec.shape[1];
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
  std::byte* to = own(bytes * static_cast<size_t>(all->shape[0]));
  view.data = to;
  if (!gather_) return view;
  for (int64_t e = 0; e < all->shape[0]; ++e, to += bytes) {
    std::memcpy(to, all->data + static_cast<size_t>(e * all->shape[1] + experts.first_row) * row_bytes,
                bytes);
  }
  return view;
}

// Floats [experts, cols, rows], used as x W. Turned into [experts, rows, cols].
std::optional<TensorView> WeightSource::gather_transposed(int layer, const WeightSpec& spec) {
  const HfExperts& experts = *spec.experts;
  const TensorView* fused = checkpoint_.find_tensor(expert_name(layer, experts, experts.fused));
  if (fused == nullptr) return std::nullopt;
  const int64_t parts = experts.parts * experts.row_step;
  if (fused->rank != 3 || info(fused->type).block_elements != 1 || fused->shape[2] % parts != 0) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found {} of rank {}, expected floats [experts, cols, rows]",
                checkpoint_.path(), fused->name, info(fused->type).name, fused->rank);
  }
  const int64_t num_experts = fused->shape[0], cols = fused->shape[1], rows = fused->shape[2] / parts;
  const size_t element = static_cast<size_t>(info(fused->type).block_bytes);
  TensorView view = *fused;
  set_shape(view, {num_experts, rows, cols});
  view.row_stride_bytes = static_cast<int64_t>(element) * cols;
  std::byte* to = own(element * static_cast<size_t>(num_experts * rows * cols));
  view.data = to;
  if (!gather_) return view;
  for (int64_t x = 0; x < num_experts; ++x) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c, to += element) {
        std::memcpy(to,
                    fused->data + element * ((x * cols + c) * fused->shape[2] + experts.first_row +
                                             r * experts.row_step),
                    element);
      }
    }
  }
  return view;
}

// FP8: X.weight_scale_inv, a grid of patches, or X.weight_scale, per tensor or per row.
void WeightSource::attach_scales(TensorView& view, const std::string& base_name) const {
  if (view.type != DType::kF8E4M3) return;
  const TensorView* grid = checkpoint_.find_tensor(base_name + ".weight_scale_inv");
  if (grid == nullptr) grid = checkpoint_.find_tensor(base_name + ".weight_scale");
  if (grid == nullptr) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found f8_e4m3 without scales, expected {}.weight_scale_inv or .weight_scale",
                checkpoint_.path(), view.name, base_name);
  }
  const int64_t rows = view.rows(), cols = view.cols();
  const int64_t grid_cols = grid->rank == 2 ? grid->shape[1] : 1,
                grid_rows = grid->rank == 0 ? 1 : grid->shape[0];
  // Patches are square where there are several columns of them, 128 in every published file.
  int64_t patch_rows = grid_rows == 1 ? rows : (grid_rows == rows ? 1 : 128);
  int64_t patch_cols = grid_cols == 1 ? cols : 128;
  if (!checkpoint_.hf->config.is_null() && checkpoint_.hf->config.contains("quantization_config")) {
    const auto& q = checkpoint_.hf->config["quantization_config"];
    if (q.is_object() && q.contains("weight_block_size") && q["weight_block_size"].is_array() &&
        q["weight_block_size"].size() == 2 && q["weight_block_size"][0].is_number_integer() &&
        q["weight_block_size"][1].is_number_integer() && grid->rank == 2) {
      patch_rows = q["weight_block_size"][0].get<int64_t>();
      patch_cols = q["weight_block_size"][1].get<int64_t>();
    }
  }
  const bool fits = patch_rows > 0 && patch_cols > 0 && grid_rows == (rows + patch_rows - 1) / patch_rows &&
                    grid_cols == (cols + patch_cols - 1) / patch_cols;
  if (!fits || (grid->type != DType::kF32 && grid->type != DType::kBF16)) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found a {} grid of {} x {}, expected f32 or bf16 covering {} x {} in patches",
                checkpoint_.path(), grid->name, info(grid->type).name, grid_rows, grid_cols, rows, cols);
  }
  view.scales = {.data = grid->data,
                 .type = grid->type,
                 .rows_per_scale = patch_rows,
                 .cols_per_scale = patch_cols,
                 .scales_per_row = grid_cols};
}

// Rows of a larger matrix or vector that the file has instead.
std::optional<TensorView> WeightSource::find_part(int layer, const WeightSpec& spec) const {
  const PartOf& part = *spec.part_of;
  WeightSpec whole = spec;
  whole.role = part.gguf;
  whole.hf = part.hf;
  whole.gguf = {};
  if ((checkpoint_.gguf ? part.gguf : part.hf).empty()) return std::nullopt;
  std::optional<TensorView> view = find_plain(layer, whole);
  if (!view) return std::nullopt;
  const bool vector = view->rank == 1;
  const int64_t rows = spec.shape[0],
                found = view->shape[spec.hf_transposed && checkpoint_.hf && !vector ? 1 : 0];
  if (found != part.all_rows || view->rank != static_cast<int>(spec.shape.size()))
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {} rows, expected {}", checkpoint_.path(),
                view->name, found, part.all_rows);
  if (spec.hf_transposed && checkpoint_.hf && !vector) {  // columns, until they are transposed
    view->data += part.first_row * info(view->type).block_bytes;
    view->shape[1] = rows;
    return view;
  }
  view->data +=
      vector ? part.first_row * info(view->type).block_bytes : part.first_row * view->row_stride_bytes;
  view->shape[0] = rows;
  if (view->scales.data != nullptr) {
    if (part.first_row % view->scales.rows_per_scale != 0)
      throw_error(ErrorCode::kUnsupported,
                  "{}: tensor {}: its scales do not part where its rows do; quantize it first",
                  checkpoint_.path(), view->name);
    view->scales.data += static_cast<int64_t>(bytes_of(
        view->scales.type, part.first_row / view->scales.rows_per_scale * view->scales.scales_per_row));
  }
  return view;
}

// A matrix that Hugging Face stores as [in, out], turned around.
TensorView WeightSource::gather_turned(const TensorView& from) {
  if (info(from.type).block_elements != 1)
    throw_error(ErrorCode::kUnsupported, "{}: tensor {}: found {}, expected floats to transpose",
                checkpoint_.path(), from.name, info(from.type).name);
  const int64_t rows = from.shape[1], cols = from.shape[0];
  const size_t element = static_cast<size_t>(info(from.type).block_bytes);
  TensorView view = from;
  set_shape(view, {rows, cols});
  view.row_stride_bytes = static_cast<int64_t>(element) * cols;
  std::byte* to = own(element * static_cast<size_t>(rows * cols));
  view.data = to;
  if (!gather_) return view;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c, to += element)
      std::memcpy(to, from.data + c * from.row_stride_bytes + r * static_cast<int64_t>(element), element);
  }
  return view;
}

// A vector plus a number, as float32.
TensorView WeightSource::gather_offset(const TensorView& from, float offset) {
  TensorView view = from;
  view.type = DType::kF32;
  view.row_stride_bytes = static_cast<int64_t>(sizeof(float)) * from.cols();
  std::byte* to = own(sizeof(float) * static_cast<size_t>(from.cols()));
  view.data = to;
  if (!gather_) return view;
  auto* values = reinterpret_cast<float*>(to);
  quant::dequantize_row(from, 0, values);
  for (int64_t i = 0; i < from.cols(); ++i) values[i] += offset;
  return view;
}

std::optional<TensorView> WeightSource::find(int layer, std::string_view role, std::vector<int64_t> shape) {
  const WeightSpec* spec = spec_of(layer, role);
  if (spec == nullptr) return std::nullopt;
  std::optional<TensorView> found =
      checkpoint_.hf && spec->experts ? find_experts(layer, *spec) : find_plain(layer, *spec);
  if (!found && spec->part_of) found = find_part(layer, *spec);
  if (!found) return std::nullopt;
  if (checkpoint_.hf && spec->hf_transposed && found->rank == 2) found = gather_turned(*found);
  if (checkpoint_.hf && spec->hf_offset != 0.0f) found = gather_offset(*found, spec->hf_offset);
  // One row of a matrix may be a vector in the file.
  if (found->rank == 1 && shape.size() == 2 && shape[0] == 1) set_shape(*found, {1, found->shape[0]});
  // A bias or norm may be seen as [n] or, through a stride, as [.., n, 1].
  std::vector<int64_t> seen(found->shape.begin(), found->shape.begin() + found->rank);
  if (seen.size() > 1 && seen.back() == 1 && seen.size() == shape.size() + 1) seen.pop_back();
  if (seen != shape) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found shape {}, expected {}", checkpoint_.path(),
                found->name, shape_text(seen), shape_text(shape));
  }
  if (found->type == DType::kU8 || found->type == DType::kI32) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found type {}, expected a weight type",
                checkpoint_.path(), found->name, info(found->type).name);
  }
  return found;
}

TensorView WeightSource::require(int layer, std::string_view role, std::vector<int64_t> shape) {
  if (std::optional<TensorView> view = find(layer, role, std::move(shape))) return *view;
  const WeightSpec* spec = spec_of(layer, role);
  const std::vector<std::string> tried =
      spec == nullptr ? std::vector<std::string>{std::string(role)} : names_of(layer, *spec);
  throw_error(ErrorCode::kBadInput, "{}: tensor {}: found nothing, expected it for architecture {}",
              checkpoint_.path(), fmt::join(tried, " or "), config_.architecture);
}

}  // namespace millrace
