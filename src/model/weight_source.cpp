#include "model/weight_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/float_bits.h"
#include "io/hf_directory.h"
#include "kernels/quant/codec.h"
#include "model/architecture.h"
#include "model/quantized_weights/fp8_scales.h"

namespace millrace {
namespace {

// "ffn_gate_up_exps" for "ffn_gate_exps" and "ffn_up_exps"; else nothing.
std::string fused_gate_up_name(int layer, std::string_view role) {
  for (const std::string_view one : {"ffn_gate_exps.", "ffn_up_exps."}) {
    if (role.starts_with(one))
      return fmt::format("blk.{}.ffn_gate_up_exps.{}", layer, role.substr(one.size()));
  }
  return {};
}

std::set<std::string> set_of(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

}  // namespace

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void set_shape(TensorView& view, std::initializer_list<int64_t> shape) {
  view.rank = static_cast<int>(shape.size());
  view.shape = {1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
}

WeightSource::WeightSource(const io::Checkpoint& checkpoint, const ModelConfig& config, bool gather,
                           Parallel parallel)
    : checkpoint_(checkpoint),
      config_(config),
      architecture_(architecture_of(config)),
      gather_(gather),
      parallel_(std::move(parallel)) {
  check_quantization(checkpoint);
}

bool has_output_alone(const io::Checkpoint& checkpoint, const HfNames& names) {
  if (!checkpoint.hf || names.output.empty()) return false;
  const auto tie = checkpoint.hf->config.find("tie_word_embeddings");
  return tie != checkpoint.hf->config.end() && *tie == true &&
         !has_weight(checkpoint, std::string(names.embedding)) &&
         has_weight(checkpoint, std::string(names.output));
}

const std::vector<WeightSpec>& WeightSource::specs(int layer) {
  const auto known = specs_.find(layer);
  if (known != specs_.end()) return known->second;
  if (layer >= 0) return specs_[layer] = architecture_.layer_weights(config_, layer);
  const HfNames hf = architecture_.hf_names();
  const std::vector<int64_t> matrix = {config_.vocab, config_.hidden};
  std::vector<WeightSpec> outside = {
      {.role = "token_embd.weight", .hf = hf.embedding, .shape = matrix, .use = WeightUse::kLookup},
      {.role = hf.gguf_output_norm,
       .hf = hf.output_norm,
       .shape = {config_.hidden},
       .presence = hf.has_output_norm ? Presence::kRequired : Presence::kRare,
       .hf_offset = hf.norm_offset},
      {.role = "output.weight",
       .hf = hf.output,
       .shape = matrix,
       .use = WeightUse::kMatrix,
       .presence = Presence::kUsual}};
  if (has_output_alone(checkpoint_, hf)) {  // it is both
    outside[0].hf = hf.output;
    outside[2].hf = hf.embedding;
  }
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

std::byte* WeightSource::own_experts(int64_t experts, size_t bytes_of_each) {
  const size_t counted = gathered_bytes_;
  std::byte* memory = own(static_cast<size_t>(experts) * bytes_of_each);
  const int64_t wanted = std::min(wanted_experts_.end, experts) - wanted_experts_.begin;
  gathered_bytes_ = counted + static_cast<size_t>(wanted) * bytes_of_each;
  return memory;
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
  if (spec.experts && spec.experts->fused.empty()) {
    std::vector<std::string> names;
    if (!spec.experts->single.empty())
      names.push_back(expert_name(layer, *spec.experts, fmt::format("0.{}.weight", spec.experts->single)));
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
  const HfNames hf = architecture_.hf_names();
  const std::string before = layer < 0 ? "" : fmt::format("{}{}.", hf.layers, layer);
  const std::string name = before + std::string(spec.hf);
  if (hf.prefix.empty()) return {name};
  return {name, std::string(hf.prefix) + name};
}

std::optional<WeightSource::Stored> WeightSource::find_stored(const std::string& name, int64_t rows,
                                                              int64_t cols) {
  if (std::optional<QuantizedWeight> packed = find_quantized(checkpoint_, name, rows, cols)) {
    TensorView view;
    view.name = packed->name;
    view.type = packed->type;
    set_shape(view, {rows, cols});
    view.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, cols));
    return Stored{view, std::move(packed->rows), std::move(packed->scheme)};
  }
  const TensorView* found = checkpoint_.find_tensor(name);
  if (found == nullptr) return std::nullopt;
  Stored stored{*found};
  if (name.ends_with(".weight")) attach_scales(stored.view);
  return stored;
}

void WeightSource::unpack(const Stored& stored, DType type, std::byte* to) const {
  const int64_t rows = stored.view.rows(), step = QuantizedWeight::kRowsAtOnce;
  const size_t row_bytes = bytes_of(type, stored.view.cols());
  const auto some = [&](int64_t begin, int64_t end) {
    const int64_t first = begin * step, last = std::min(end * step, rows);
    for (int64_t r = first; r < last; r += step) {
      stored.packed->read(type, r, std::min(step, last - r), to + static_cast<size_t>(r) * row_bytes);
    }
  };
  const int64_t tasks = (rows + step - 1) / step;
  if (parallel_) {
    parallel_(tasks, some);
  } else {
    some(0, tasks);
  }
}

std::optional<TensorView> WeightSource::find_plain(int layer, const WeightSpec& spec) {
  const bool matrix = spec.shape.size() == 2;
  for (const std::string& name : names_of(layer, spec)) {
    std::optional<Stored> stored = matrix ? find_stored(name, spec.shape[0], spec.shape[1]) : std::nullopt;
    if (!matrix) {
      if (const TensorView* view = checkpoint_.find_tensor(name)) stored = Stored{*view};
    }
    if (!stored) continue;
    if (stored->packed == nullptr) {
      if (name.ends_with(".weight") && !has_own_scale(layer, spec.role))
        attach_factor(stored->view, name.substr(0, name.size() - 7));
      return stored->view;
    }
    ++unpacked_[{stored->scheme, stored->view.type}];
    std::byte* to = own(stored->view.bytes());
    stored->view.data = to;
    if (gather_) unpack(*stored, stored->view.type, to);
    return stored->view;
  }
  return std::nullopt;
}

std::optional<TensorView> WeightSource::gather_gate_up(int layer, const WeightSpec& spec) {
  const std::string name = fused_gate_up_name(layer, spec.role);
  const TensorView* fused = name.empty() ? nullptr : checkpoint_.find_tensor(name);
  if (fused == nullptr) return std::nullopt;
  const auto wanted = static_cast<int>(spec.shape.size());  // 3 of matrices, 2 of biases
  if (fused->rank != wanted || fused->shape[0] < 1 || fused->shape[1] % 2 != 0) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found shape {}, expected [experts, 2 * rows{}]",
                checkpoint_.path(), name, shape_text({fused->shape.data(), static_cast<size_t>(fused->rank)}),
                wanted == 3 ? ", cols" : "");
  }
  TensorView view = *fused;
  if (name.ends_with(".weight")) attach_factor(view, name.substr(0, name.size() - 7));
  view.shape[1] /= 2;
  const size_t part = view.bytes() / static_cast<size_t>(view.shape[0]);  // of one expert
  const size_t skipped = spec.role.starts_with("ffn_up") ? part : 0;
  std::byte* to = own(part * static_cast<size_t>(view.shape[0]));
  view.data = to;
  if (view.rank == 2) view.row_stride_bytes = static_cast<int64_t>(part);
  if (view.scales.rows_per_scale > 1) view.scales.rows_per_scale /= 2;
  for (int64_t x = 0; gather_ && x < view.shape[0]; ++x, to += part) {
    std::memcpy(to, fused->data + static_cast<size_t>(2 * x) * part + skipped, part);
  }
  return view;
}

// Does the architecture read "ffn_down_exps.scale" beside "ffn_down_exps.weight" itself (Gemma 4)?
bool WeightSource::has_own_scale(int layer, std::string_view role) {
  return role.ends_with(".weight") &&
         spec_of(layer, std::string(role.substr(0, role.size() - 6)) + "scale") != nullptr;
}

void WeightSource::attach_factor(TensorView& view, const std::string& base_name) const {
  if (!checkpoint_.gguf || base_name.ends_with("ffn_gate_inp")) return;  // a router's is something else
  const TensorView* factor = checkpoint_.find_tensor(base_name + ".scale");
  if (factor == nullptr) return;
  const int64_t experts = view.rank == 3 ? view.shape[0] : 1;
  if (factor->type != DType::kF32 || factor->elements() < 1 ||
      (factor->elements() != 1 && factor->elements() != experts)) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {} of {} elements, expected f32 of {}",
                checkpoint_.path(), factor->name, info(factor->type).name, factor->elements(),
                experts == 1 ? "one" : fmt::format("one or {}", experts));
  }
  view.scales = {.data = factor->data,
                 .type = DType::kF32,
                 .rows_per_scale = view.rows() / factor->elements(),
                 .cols_per_scale = view.cols(),
                 .scales_per_row = 1};
}

// FP8 has its scales beside it. F16 ones are widened: kernels read float32 and bf16.
void WeightSource::attach_scales(TensorView& view) {
  if (view.type != DType::kF8E4M3) return;
  const Fp8Scales found = find_fp8_scales(checkpoint_, view);
  view.scales = found.grid;
  if (found.stored_type != DType::kF16) return;
  std::byte* to = own(bytes_of(DType::kF32, found.count));
  if (!gather_) return;
  view.scales.data = to;
  for (int64_t i = 0; i < found.count; ++i) {
    Half half;
    std::memcpy(&half, found.stored + i * static_cast<int64_t>(sizeof half), sizeof half);
    const float wide = to_float(half);
    std::memcpy(to + i * static_cast<int64_t>(sizeof wide), &wide, sizeof wide);
  }
}

// Rows of a larger matrix or vector that the file has instead.
std::optional<TensorView> WeightSource::find_part(int layer, const WeightSpec& spec) {
  const PartOf& part = *spec.part_of;
  WeightSpec whole = spec;
  whole.role = part.gguf;
  whole.hf = part.hf;
  whole.gguf = {};
  whole.shape[0] = part.all_rows;
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
    if (view->data != nullptr) view->data += part.first_row * info(view->type).block_bytes;
    view->shape[1] = rows;
    return view;
  }
  const int64_t row_bytes = vector ? info(view->type).block_bytes : view->row_stride_bytes;
  if (view->data != nullptr) view->data += part.first_row * row_bytes;
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

// Some rows of every head of a matrix, as they are or, where they are turned or have scales beside them, as
// float32: their blocks do not part as heads do.
std::optional<TensorView> WeightSource::gather_heads(int layer, const WeightSpec& spec) {
  const HeadsOf& of = *spec.heads_of;
  const int64_t heads = spec.shape[0], rows = spec.shape[1], cols = spec.shape[2];
  WeightSpec whole = spec;
  whole.role = of.gguf;
  whole.hf = of.hf;
  whole.gguf = {};
  whole.shape = {heads * of.head_rows, of.turned ? rows : cols};
  const std::optional<TensorView> from = find_plain(layer, whole);
  if (!from) return std::nullopt;
  if (from->rank != 2 || from->shape[0] != whole.shape[0] || from->shape[1] != whole.shape[1]) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found shape {}, expected {}", checkpoint_.path(),
                from->name, shape_text({from->shape.data(), static_cast<size_t>(from->rank)}),
                shape_text(whole.shape));
  }
  TensorView view = *from;
  const bool as_is = !of.turned && from->scales.data == nullptr;
  if (!as_is) view.type = DType::kF32;
  view.scales = {};
  set_shape(view, {heads, rows, cols});
  const size_t row_bytes = bytes_of(view.type, cols);
  view.row_stride_bytes = static_cast<int64_t>(row_bytes);
  std::byte* to = own(row_bytes * static_cast<size_t>(heads * rows));
  view.data = to;
  if (!gather_) return view;
  std::vector<float> row(static_cast<size_t>(from->cols()));
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t first = h * of.head_rows + of.first_row;
    for (int64_t r = 0; r < (of.turned ? cols : rows); ++r) {
      if (as_is) {
        std::memcpy(to + static_cast<size_t>(h * rows + r) * row_bytes,
                    from->data + (first + r) * from->row_stride_bytes, row_bytes);
        continue;
      }
      quant::dequantize_row(*from, first + r, row.data());
      auto* values = reinterpret_cast<float*>(to) + h * rows * cols;
      for (int64_t c = 0; c < from->cols(); ++c)
        values[of.turned ? c * cols + r : r * cols + c] = row[static_cast<size_t>(c)];
    }
  }
  return view;
}

// Vectors, one behind the other, as rows.
std::optional<TensorView> WeightSource::gather_rows(int layer, const WeightSpec& spec) {
  std::vector<const TensorView*> rows;
  for (const std::string_view part : spec.hf_rows) {
    const std::string name = fmt::format("{}{}.{}", architecture_.hf_names().layers, layer, part);
    const TensorView* row = checkpoint_.find_tensor(name);
    if (row == nullptr && rows.empty()) return std::nullopt;
    if (row == nullptr || row->elements() != spec.shape.back() ||
        row->type != (rows.empty() ? row : rows[0])->type || info(row->type).block_elements != 1)
      throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {}, expected floats [{}] of one type",
                  checkpoint_.path(), name,
                  row == nullptr
                      ? "nothing"
                      : fmt::format("{} {}", info(row->type).name,
                                    shape_text({row->shape.data(), static_cast<size_t>(row->rank)})),
                  spec.shape.back());
    rows.push_back(row);
  }
  TensorView view = *rows.front();
  const size_t bytes = bytes_of(view.type, spec.shape.back());
  view.rank = static_cast<int>(spec.shape.size());
  view.shape = {1, 1, 1, 1};
  std::copy(spec.shape.begin(), spec.shape.end(), view.shape.begin());
  view.row_stride_bytes = static_cast<int64_t>(bytes);
  std::byte* to = own(bytes * rows.size());
  view.data = to;
  for (size_t r = 0; gather_ && r < rows.size(); ++r) std::memcpy(to + r * bytes, rows[r]->data, bytes);
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

// A vector times a number, as float32.
TensorView WeightSource::gather_scaled(const TensorView& from, float scale) {
  TensorView view = gather_offset(from, 0.0f);
  if (!gather_) return view;
  auto* values = reinterpret_cast<float*>(gathered_.back().get());
  for (int64_t i = 0; i < from.cols(); ++i) values[i] *= scale;
  return view;
}

// -exp of each element, as float32.
TensorView WeightSource::gather_negative_exp(const TensorView& from) {
  TensorView view = gather_offset(from, 0.0f);
  if (!gather_) return view;
  auto* values = reinterpret_cast<float*>(gathered_.back().get());
  for (int64_t i = 0; i < from.cols(); ++i) values[i] = -std::exp(values[i]);
  return view;
}

// Heads in another order: rows, or the columns of each row.
TensorView WeightSource::gather_tiled(const TensorView& from, const HeadTiles& tiles) {
  if (from.scales.data != nullptr || (tiles.columns && info(from.type).block_elements != 1)) {
    throw_error(ErrorCode::kUnsupported,
                "{}: tensor {}: found {} with heads to be put in another order, "
                "expected floats",
                checkpoint_.path(), from.name, info(from.type).name);
  }
  TensorView view = from;
  const size_t row_bytes = bytes_of(from.type, from.cols());
  view.row_stride_bytes = static_cast<int64_t>(row_bytes);
  std::byte* to = own(row_bytes * static_cast<size_t>(from.rows()));
  view.data = to;
  if (!gather_) return view;
  const auto element = static_cast<int64_t>(info(from.type).block_bytes);
  for (int64_t r = 0; r < from.rows(); ++r, to += row_bytes) {
    const std::byte* row = from.data + (tiles.columns ? r : tiles.source(r)) * from.row_stride_bytes;
    if (!tiles.columns) std::memcpy(to, row, row_bytes);
    for (int64_t c = 0; tiles.columns && c < from.cols(); ++c)
      std::memcpy(to + c * element, row + tiles.source(c) * element, static_cast<size_t>(element));
  }
  return view;
}

std::optional<TensorView> WeightSource::find(int layer, std::string_view role, std::vector<int64_t> shape) {
  const WeightSpec* spec = spec_of(layer, role);
  if (spec == nullptr) return std::nullopt;
  std::optional<TensorView> found =
      checkpoint_.hf && spec->experts ? find_experts(layer, *spec) : find_plain(layer, *spec);
  // Phi-3's and ModernBERT's ffn_up.weight has gate and up where there is no gate of its own.
  const bool whole = found && spec->part_of && checkpoint_.gguf && spec->part_of->gguf == spec->role &&
                     found->shape[0] == spec->part_of->all_rows;
  if (spec->part_of && (!found || whole)) found = find_part(layer, *spec);
  if (!found && spec->heads_of) found = gather_heads(layer, *spec);
  if (!found && checkpoint_.gguf && spec->experts) found = gather_gate_up(layer, *spec);
  if (!found && checkpoint_.hf && !spec->hf_rows.empty()) found = gather_rows(layer, *spec);
  if (!found) return std::nullopt;
  // A number for each head may have a shape to be spread by, [1, 1, heads, 1] (Kimi Linear); a convolution
  // too, [1, channels, 1, taps].
  if (found->rank > 2 && shape.size() == 1 && found->elements() == shape[0]) {
    found->row_stride_bytes = static_cast<int64_t>(bytes_of(found->type, shape[0]));
    set_shape(*found, {shape[0]});
  }
  if (found->rank == 4 && shape.size() == 2 && found->shape[0] == 1 && found->shape[2] == 1)
    set_shape(*found, {found->shape[1], found->shape[3]});
  if (checkpoint_.hf && spec->hf_transposed && found->rank == 2) found = gather_turned(*found);
  if (checkpoint_.hf && spec->hf_offset != 0.0f) found = gather_offset(*found, spec->hf_offset);
  if (checkpoint_.hf && spec->hf_scale != 1.0f) found = gather_scaled(*found, spec->hf_scale);
  if (checkpoint_.hf && spec->hf_negative_log) found = gather_negative_exp(*found);
  // A convolution of each channel by itself: [channels, 1, taps].
  if (found->rank == 3 && shape.size() == 2 && found->shape[1] == 1)
    set_shape(*found, {found->shape[0], found->shape[2]});
  // A vector may be in groups in the file.
  if (found->rank == 2 && shape.size() == 1 && found->shape[1] > 1 && found->elements() == shape[0] &&
      found->row_stride_bytes == static_cast<int64_t>(bytes_of(found->type, found->shape[1])))
    set_shape(*found, {shape[0]});
  // Rows may have a shape to be spread by (RWKV 7).
  if (found->rank == 2 && shape.size() == 4 && shape[0] == found->shape[0] && shape[3] == found->shape[1])
    set_shape(*found, {shape[0], 1, 1, shape[3]});
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
  if (checkpoint_.hf && spec->hf_tiles) found = gather_tiled(*found, *spec->hf_tiles);
  return found;
}

bool WeightSource::has(int layer, std::string_view role) {
  const WeightSpec* spec = spec_of(layer, role);
  if (spec == nullptr) return false;
  const std::vector<std::string> names = names_of(layer, *spec);
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return has_weight(checkpoint_, name); });
}

std::set<std::string> WeightSource::all_names(int layer) {
  std::set<std::string> out;
  for (const WeightSpec& spec : specs(layer)) {
    out.merge(set_of(names_of(layer, spec)));
    WeightSpec whole = spec;
    whole.gguf = {};
    const auto add = [&](std::string_view gguf, std::string_view hf) {
      whole.role = gguf;
      whole.hf = hf;
      if (!(checkpoint_.gguf ? gguf : hf).empty()) out.merge(set_of(names_of(layer, whole)));
    };
    if (spec.part_of) add(spec.part_of->gguf, spec.part_of->hf);
    if (spec.heads_of) add(spec.heads_of->gguf, spec.heads_of->hf);
    if (checkpoint_.gguf && spec.experts) out.insert(fused_gate_up_name(layer, spec.role));
  }
  return out;
}

TensorView WeightSource::require(int layer, std::string_view role, std::vector<int64_t> shape) {
  if (std::optional<TensorView> view = find(layer, role, std::move(shape))) return *view;
  const WeightSpec* spec = spec_of(layer, role);
  std::vector<std::string> tried =
      spec == nullptr ? std::vector<std::string>{std::string(role)} : names_of(layer, *spec);
  if (spec != nullptr && spec->part_of) {
    WeightSpec whole = *spec;
    whole.role = spec->part_of->gguf;
    whole.hf = spec->part_of->hf;
    whole.gguf = {};
    for (std::string& name : names_of(layer, whole)) tried.push_back(std::move(name));
  }
  if (spec != nullptr && spec->heads_of)
    tried.push_back(fmt::format("the rows of layer {} of {}", layer,
                                checkpoint_.gguf ? spec->heads_of->gguf : spec->heads_of->hf));
  throw_error(ErrorCode::kBadInput, "{}: tensor {}: found nothing, expected it for architecture {}",
              checkpoint_.path(), fmt::join(tried, " or "), config_.architecture);
}

}  // namespace millrace
