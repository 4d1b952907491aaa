#include "model/weight_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {
namespace {

struct RoleNames {
  std::string_view role;  // GGUF's name
  std::string_view hf;    // Hugging Face's, without "model.layers.N."
};

constexpr RoleNames kLayerRoles[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},       {"ffn_gate_inp", "mlp.router"},  // gpt-oss
    {"ffn_gate_inp", "mlp.gate"},                                         // qwen3moe
};

struct ExpertRole {
  std::string_view role;    // GGUF's name
  std::string_view single;  // one tensor per expert: mlp.experts.E.<single>.weight
  std::string_view fused;   // gpt-oss: mlp.experts.<fused>{,_blocks,_scales,_bias}
  int64_t first, step;      // which rows of the fused tensor: gate 0, 2, 4 ...; up 1, 3, 5 ...
};

constexpr ExpertRole kExpertRoles[] = {
    {"ffn_gate_exps", "gate_proj", "gate_up_proj", 0, 2},
    {"ffn_up_exps", "up_proj", "gate_up_proj", 1, 2},
    {"ffn_down_exps", "down_proj", "down_proj", 0, 1},
};

std::pair<std::string_view, std::string_view> split_suffix(std::string_view role) {
  const size_t dot = role.rfind('.');
  return {role.substr(0, dot), role.substr(dot + 1)};
}

const ExpertRole* expert_role(std::string_view stem) {
  for (const ExpertRole& e : kExpertRoles) {
    if (e.role == stem) return &e;
  }
  return nullptr;
}

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void set_shape(TensorView& view, std::initializer_list<int64_t> shape) {
  view.rank = static_cast<int>(shape.size());
  view.shape = {1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
}

}  // namespace

WeightSource::WeightSource(const io::Checkpoint& checkpoint, const ModelConfig& config, bool gather)
    : checkpoint_(checkpoint), config_(config), gather_(gather) {}

std::byte* WeightSource::own(size_t bytes) {
  gathered_bytes_ += bytes;
  if (!gather_) return nullptr;
  gathered_.push_back(std::unique_ptr<std::byte[]>(new std::byte[bytes]));
  return gathered_.back().get();
}

const TensorView* WeightSource::find_named(int layer, std::string_view role, std::string* tried) const {
  std::vector<std::string> names;
  if (checkpoint_.gguf) {
    const std::string prefix = layer < 0 ? "" : fmt::format("blk.{}.", layer);
    names.push_back(prefix + std::string(role));
    if (role == "ffn_norm.weight") names.push_back(prefix + "post_attention_norm.weight");
    if (role == "attn_sinks.weight") names.push_back(prefix + "attn_sinks");
  } else if (layer < 0) {
    if (role == "token_embd.weight") names.push_back("model.embed_tokens.weight");
    if (role == "output_norm.weight") names.push_back("model.norm.weight");
    if (role == "output.weight") names.push_back("lm_head.weight");
  } else {
    const auto [stem, suffix] = split_suffix(role);
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    for (const RoleNames& r : kLayerRoles) {
      if (r.role == stem) names.push_back(fmt::format("{}{}.{}", prefix, r.hf, suffix));
    }
    if (stem == "attn_sinks") names.push_back(prefix + "self_attn.sinks");
    if (const ExpertRole* e = expert_role(stem)) {
      names.push_back(fmt::format("{}mlp.experts.{}_blocks", prefix, e->fused));
    }
  }
  for (const std::string& name : names) {
    if (const TensorView* view = checkpoint_.find_tensor(name)) return view;
    if (tried != nullptr) *tried += (tried->empty() ? "" : " or ") + name;
  }
  return nullptr;
}

// gpt-oss as published: blocks [experts, rows, cols / 32, 16] and scales [experts, rows, cols / 32] in MXFP4,
// biases [experts, rows]; gate and up are alternate rows of one tensor, seen here through a doubled row
// stride.
std::optional<TensorView> WeightSource::find_hf_experts(int layer, std::string_view role) const {
  const auto [stem, suffix] = split_suffix(role);
  const ExpertRole* e = expert_role(stem);
  if (e == nullptr || !checkpoint_.hf) return std::nullopt;
  const std::string base = fmt::format("model.layers.{}.mlp.experts.{}", layer, e->fused);

  if (suffix == "bias") {
    const TensorView* bias = checkpoint_.find_tensor(base + "_bias");
    if (bias == nullptr || bias->rank != 2 || bias->shape[1] % e->step != 0) return std::nullopt;
    TensorView view = *bias;  // [experts, rows] with a stride between rows: as [experts, rows, 1]
    set_shape(view, {bias->shape[0], bias->shape[1] / e->step, 1});
    const int64_t element = info(bias->type).block_bytes;
    view.data += e->first * element;
    view.row_stride_bytes = e->step * element;
    return view;
  }
  const TensorView* blocks = checkpoint_.find_tensor(base + "_blocks");
  const TensorView* scales = checkpoint_.find_tensor(base + "_scales");
  if (blocks == nullptr) return std::nullopt;
  if (scales == nullptr || blocks->rank != 4 || scales->rank != 3 || blocks->type != DType::kU8 ||
      scales->type != DType::kU8 || blocks->shape[3] != 16 || blocks->shape[1] % e->step != 0 ||
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
  set_shape(view, {blocks->shape[0], blocks->shape[1] / e->step, groups * 32});
  view.data += e->first * groups * 16;
  view.row_stride_bytes = e->step * groups * 16;
  view.scales = {.data = scales->data + e->first * groups,
                 .type = DType::kU8,
                 .rows_per_scale = 1,
                 .cols_per_scale = 32,
                 .scales_per_row = e->step * groups};
  return view;
}

// qwen3moe as published: one tensor per expert. Backends want one [experts, rows, cols].
std::optional<TensorView> WeightSource::gather_expert_tensors(int layer, std::string_view role) {
  const auto [stem, suffix] = split_suffix(role);
  const ExpertRole* e = expert_role(stem);
  if (e == nullptr || !checkpoint_.hf || suffix != "weight") return std::nullopt;
  std::vector<TensorView> parts;
  for (int32_t i = 0; i < config_.experts; ++i) {
    const std::string name = fmt::format("model.layers.{}.mlp.experts.{}.{}", layer, i, e->single);
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

// gpt-oss before quantization: [experts, cols, rows], used as x W. Turned into [experts, rows, cols].
std::optional<TensorView> WeightSource::gather_transposed(int layer, std::string_view role) {
  const auto [stem, suffix] = split_suffix(role);
  const ExpertRole* e = expert_role(stem);
  if (e == nullptr || !checkpoint_.hf || suffix != "weight" || config_.architecture != "gpt-oss")
    return std::nullopt;
  const TensorView* fused =
      checkpoint_.find_tensor(fmt::format("model.layers.{}.mlp.experts.{}", layer, e->fused));
  if (fused == nullptr) return std::nullopt;
  if (fused->rank != 3 || info(fused->type).block_elements != 1 || fused->shape[2] % e->step != 0) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found {} of rank {}, expected floats [experts, cols, rows]",
                checkpoint_.path(), fused->name, info(fused->type).name, fused->rank);
  }
  const int64_t experts = fused->shape[0], cols = fused->shape[1], rows = fused->shape[2] / e->step;
  const size_t element = static_cast<size_t>(info(fused->type).block_bytes);
  TensorView view = *fused;
  set_shape(view, {experts, rows, cols});
  view.row_stride_bytes = static_cast<int64_t>(element) * cols;
  std::byte* to = own(element * static_cast<size_t>(experts * rows * cols));
  view.data = to;
  if (!gather_) return view;
  for (int64_t x = 0; x < experts; ++x) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c, to += element) {
        std::memcpy(to, fused->data + element * ((x * cols + c) * fused->shape[2] + e->first + r * e->step),
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

std::optional<TensorView> WeightSource::find(int layer, std::string_view role, std::vector<int64_t> shape) {
  std::optional<TensorView> found = find_hf_experts(layer, role);
  if (!found) found = gather_expert_tensors(layer, role);
  if (!found) found = gather_transposed(layer, role);
  if (!found) {
    const TensorView* named = find_named(layer, role, nullptr);
    if (named == nullptr) return std::nullopt;
    found = *named;
    const std::string& name = named->name;
    if (name.ends_with(".weight")) attach_scales(*found, name.substr(0, name.size() - 7));
  }
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
  std::string tried;
  find_named(layer, role, &tried);
  throw_error(ErrorCode::kBadInput, "{}: tensor {}: found nothing, expected it for architecture {}",
              checkpoint_.path(), tried, config_.architecture);
}

}  // namespace millrace
