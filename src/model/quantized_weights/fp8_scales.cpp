#include "model/quantized_weights/fp8_scales.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "model/quantized_weights/parts.h"

namespace millrace {
namespace {

using Patch = std::pair<int64_t, int64_t>;  // rows, columns

void add_patch(const nlohmann::json& config, const char* key, std::vector<Patch>& to) {
  if (!config.is_object() || !config.contains(key)) return;
  const nlohmann::json& value = config[key];
  if (!value.is_array() || value.size() != 2) return;
  if (!value[0].is_number_integer() || !value[1].is_number_integer()) return;
  to.emplace_back(value[0].get<int64_t>(), value[1].get<int64_t>());
}

// The patches that config.json speaks of. 128 x 128 in every published file.
std::vector<Patch> patches_of(const nlohmann::json& config) {
  std::vector<Patch> out;
  add_patch(config, "weight_block_size", out);
  if (config.is_object() && config.contains("config_groups") && config["config_groups"].is_object()) {
    for (const auto& [name, group] : config["config_groups"].items()) {
      if (group.is_object() && group.contains("weights")) add_patch(group["weights"], "block_structure", out);
    }
  }
  if (out.empty()) out.emplace_back(128, 128);
  return out;
}

}  // namespace

Fp8Scales find_fp8_scales(const io::Checkpoint& checkpoint, const TensorView& view) {
  const Parts parts(checkpoint, view.name.substr(0, view.name.size() - std::string_view(".weight").size()));
  const char* part = parts.find("weight_scale_inv") != nullptr ? "weight_scale_inv" : "weight_scale";
  if (parts.find(part) == nullptr) {
    parts.fail("weight", "f8_e4m3 without scales",
               parts.name("weight_scale_inv") + " or .weight_scale beside it");
  }
  const io::StoredTensor& stored = parts.require(part, {"F32", "BF16", "F16"});
  const int64_t rows = view.rows(), cols = view.cols();
  const int64_t grid_rows = stored.rank == 0 ? 1 : stored.shape[0];
  const int64_t grid_cols = stored.rank >= 2 ? stored.shape[1] : 1;
  std::vector<Patch> patches;
  if (grid_cols == 1 && grid_rows == 1) patches.emplace_back(rows, cols);
  if (grid_cols == 1 && grid_rows == rows) patches.emplace_back(1, cols);
  if (stored.rank == 2) {
    for (const Patch& patch : patches_of(quantization_config(checkpoint))) patches.push_back(patch);
  }
  for (const auto& [patch_rows, patch_cols] : patches) {
    if (stored.rank > 2 || patch_rows <= 0 || patch_cols <= 0) continue;
    if (grid_rows != (rows + patch_rows - 1) / patch_rows) continue;
    if (grid_cols != (cols + patch_cols - 1) / patch_cols) continue;
    const Floats numbers = floats_of(stored);
    return {.grid = {.data = stored.data,
                     .type = numbers.type == DType::kF16 ? DType::kF32 : numbers.type,
                     .rows_per_scale = patch_rows,
                     .cols_per_scale = patch_cols,
                     .scales_per_row = grid_cols},
            .count = numbers.count,
            .stored = stored.data,
            .stored_type = numbers.type};
  }
  parts.fail(part, describe(stored), fmt::format("a grid that covers {} x {} in patches", rows, cols));
}

}  // namespace millrace
