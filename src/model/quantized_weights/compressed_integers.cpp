// compressed-tensors, integer codes: packed into words along the columns (pack-quantized, 2, 4 or 8 bits), or
// a signed byte each (int-quantized, W8A8; activations are not quantized here).
//   weight_packed     I32 [rows, cols * bits / 32]   codes, 2^(bits - 1) more than they are
//   weight_shape      I64 [2]                        rows, cols
//   weight            I8  [rows, cols]
//   weight_scale          [rows, groups], [rows, 1] per row, [1] per tensor
//   weight_zero_point     packed along the rows, I32 [rows * bits / 32, groups], or I8 as the scales
//   weight_g_idx      I32 [cols]                     of files in the order of activations; -1: of no use
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "model/quantized_weights/integer_codes.h"
#include "model/quantized_weights/schemes.h"

namespace millrace {
namespace {

// Each group of modules in config.json has a size of groups; which is meant is clear from the shapes.
std::vector<int32_t> compressed_groups(const Parts& parts, const nlohmann::json& config, int64_t cols,
                                       int64_t groups) {
  const io::StoredTensor* order = parts.find("weight_g_idx");
  if (order != nullptr && groups > 1) {
    parts.require("weight_g_idx", {"I32"}, {cols});
    std::vector<int32_t> out(static_cast<size_t>(cols));
    bool unused = true, good = true;
    for (int64_t i = 0; i < cols; ++i) {
      out[i] = load_number<int32_t>(order->data, i);
      unused = unused && out[i] == -1;
      good = good && out[i] >= 0 && out[i] < groups;
    }
    if (good) return out;
    if (!unused) parts.fail("weight_g_idx", "a group that has no scale", fmt::format("0 to {}", groups - 1));
  }
  if (groups == 1) return groups_in_order(cols, cols);
  const auto found = config.find("config_groups");
  if (found != config.end() && found->is_object()) {
    for (const auto& [name, group] : found->items()) {
      if (!group.is_object() || !group.contains("weights")) continue;
      const int64_t size = integer_or(group["weights"], "group_size", 0);
      if (size > 0 && cols % size == 0 && cols / size == groups) return groups_in_order(cols, size);
    }
  }
  parts.fail("weight_scale", fmt::format("{} scales for rows of {}", groups, cols),
             "one for each group_size of config.json's config_groups");
}

// Scales and what follows from them, whatever the codes lie in.
void add_scales(const Parts& parts, const nlohmann::json& config, IntegerCodes& c) {
  const io::StoredTensor& scales = parts.require("weight_scale", {"F16", "BF16", "F32"});
  const int64_t count = elements_of(scales);
  const bool by_row = scales.rank >= 1 && scales.shape[0] == c.rows && count % c.rows == 0 && count > 0;
  if (scales.rank > 2 || (!by_row && count != 1)) {
    parts.fail("weight_scale", describe(scales), fmt::format("[{}, groups] or [1]", c.rows));
  }
  c.groups = by_row ? count / c.rows : 1;
  c.scales = floats_of(scales);
  c.scale_row_step = by_row ? c.groups : 0;
  c.scale_group_step = 1;
  c.group_of = compressed_groups(parts, config, c.cols, c.groups);

  const io::StoredTensor* zeros = parts.find("weight_zero_point");
  if (zeros == nullptr) return;
  const int half = 1 << (c.bits - 1);
  if (zeros->dtype == "I8") {
    parts.require("weight_zero_point", {"I8"}, {scales.shape.begin(), scales.shape.begin() + scales.rank});
    c.zero = [data = zeros->data, step = c.scale_row_step, half](int64_t row, int64_t group) {
      return load_number<int8_t>(data, row * step + group) + half;
    };
  } else {
    const int64_t per = 32 / c.bits, words = (c.rows + per - 1) / per;
    parts.require("weight_zero_point", {"I32"}, {words, c.groups});
    c.zero = [data = zeros->data, per, bits = c.bits, groups = c.groups](int64_t row, int64_t group) {
      const uint32_t word = load_number<uint32_t>(data, row / per * groups + group);
      return static_cast<int>(word >> (bits * (row % per)) & ((1u << bits) - 1));
    };
  }
  for (int64_t r = 0; r < c.rows && c.fixed_zero; ++r) {
    for (int64_t g = 0; g < c.groups; ++g) c.fixed_zero = c.fixed_zero && c.zero(r, g) == half;
  }
}

}  // namespace

QuantizedWeight read_packed_integers(const Parts& parts, const nlohmann::json& config, int64_t rows,
                                     int64_t cols) {
  const io::StoredTensor& packed = parts.require("weight_packed", {"I32"});
  const int64_t words = packed.rank == 2 && packed.shape[0] == rows ? packed.shape[1] : 0;
  int bits = 0;
  for (const int candidate : {2, 4, 8}) {
    if ((cols * candidate + 31) / 32 == words) bits = candidate;
  }
  if (bits == 0) {
    parts.fail("weight_packed", describe(packed),
               fmt::format("I32 [{}, {} * bits / 32], bits 2, 4 or 8", rows, cols));
  }
  if (const io::StoredTensor* shape = parts.find("weight_shape")) {
    parts.require("weight_shape", {"I64", "I32"}, {2});
    const auto side = [&](int64_t i) {
      return shape->dtype == "I64" ? load_number<int64_t>(shape->data, i)
                                   : int64_t{load_number<int32_t>(shape->data, i)};
    };
    const bool head_only = side(0) == 0 && side(1) == 0;  // of a file that is not fetched yet (hub)
    if (!head_only && (side(0) != rows || side(1) != cols)) {
      parts.fail("weight_shape", fmt::format("[{}, {}]", side(0), side(1)),
                 fmt::format("[{}, {}]", rows, cols));
    }
  }
  IntegerCodes c{.rows = rows, .cols = cols, .bits = bits};
  add_scales(parts, config, c);
  c.codes = [=, data = packed.data](int64_t first, int64_t count, uint8_t* out) {
    const int64_t per = 32 / bits;
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < cols; ++i) {
        const uint32_t word = load_number<uint32_t>(data, (first + r) * words + i / per);
        out[r * cols + i] = static_cast<uint8_t>(word >> (bits * (i % per)) & ((1u << bits) - 1));
      }
    }
  };
  const DType type = exact_type(c);
  return {parts.name("weight_packed"), fmt::format("compressed-tensors, {} bits", bits), type,
          make_rows(std::move(c))};
}

QuantizedWeight read_int8(const Parts& parts, const nlohmann::json& config, int64_t rows, int64_t cols) {
  const io::StoredTensor& stored = parts.require("weight", {"I8"}, {rows, cols});
  IntegerCodes c{.rows = rows, .cols = cols, .bits = 8};
  add_scales(parts, config, c);
  c.codes = [=, data = stored.data](int64_t first, int64_t count, uint8_t* out) {
    for (int64_t i = 0; i < count * cols; ++i) {
      out[i] = static_cast<uint8_t>(load_number<int8_t>(data, first * cols + i) + 128);
    }
  };
  const DType type = exact_type(c);
  return {parts.name("weight"), "compressed-tensors, int8", type, make_rows(std::move(c))};
}

}  // namespace millrace
