// GPTQ: codes of 2, 4 or 8 bits, 32 / bits of them along the columns in each word.
//   qweight I32 [cols * bits / 32, rows]     word (c / per, r) has code (r, c) at bit bits * (c % per)
//   qzeros  I32 [groups, rows * bits / 32]   zero points, packed along the rows; one less than they are in
//                                            files of the first format (checkpoint_format "gptq")
//   scales      [groups, rows]
//   g_idx   I32 [cols]                       each column's group; with desc_act in no order
#include <fmt/core.h>

#include "model/quantized_weights/integer_codes.h"
#include "model/quantized_weights/schemes.h"

namespace millrace {
namespace {

std::vector<int32_t> gptq_groups(const Parts& parts, const nlohmann::json& config, int64_t cols,
                                 int64_t groups) {
  if (parts.find("g_idx") != nullptr) {
    const io::StoredTensor& stored = parts.require("g_idx", {"I32"}, {cols});
    std::vector<int32_t> out(static_cast<size_t>(cols));
    for (int64_t i = 0; i < cols; ++i) {
      out[i] = load_number<int32_t>(stored.data, i);
      if (out[i] < 0 || out[i] >= groups) {
        parts.fail("g_idx", fmt::format("group {} for column {}", out[i], i),
                   fmt::format("0 to {}", groups - 1));
      }
    }
    return out;
  }
  const int64_t said = integer_or(config, "group_size", -1);
  const int64_t size = said > 0 ? said : cols;
  if ((cols + size - 1) / size != groups) {
    parts.fail("scales", fmt::format("{} groups", groups),
               fmt::format("{} of {} columns", (cols + size - 1) / size, size));
  }
  return groups_in_order(cols, size);
}

}  // namespace

QuantizedWeight read_gptq(const Parts& parts, const nlohmann::json& config, int64_t rows, int64_t cols) {
  const io::StoredTensor& packed = parts.require("qweight", {"I32"});
  // Files of mixed precision say it in patterns of names; the shape says it too.
  const bool of_rows = packed.rank == 2 && packed.shape[1] == rows;
  const int64_t bits = of_rows ? packed.shape[0] * 32 / cols : 0;
  if (bits == 3 && packed.shape[0] * 32 == 3 * cols) parts.unsupported("qweight", "codes of 3 bits");
  if ((bits != 2 && bits != 4 && bits != 8) || packed.shape[0] * 32 != bits * cols) {
    parts.fail("qweight", describe(packed),
               fmt::format("I32 [{} * bits / 32, {}], bits 2, 4 or 8", cols, rows));
  }
  const int64_t per = 32 / bits;
  if (rows % per != 0) {
    parts.fail("qweight", fmt::format("{} rows", rows), fmt::format("a multiple of {}", per));
  }
  const io::StoredTensor& scales = parts.require("scales", {"F16", "BF16", "F32"});
  const int64_t groups = scales.rank == 2 ? scales.shape[0] : 0;
  if (groups < 1 || scales.shape[1] != rows) {
    parts.fail("scales", describe(scales), fmt::format("[groups, {}]", rows));
  }
  const io::StoredTensor& zeros = parts.require("qzeros", {"I32"}, {groups, rows / per});

  IntegerCodes c{.rows = rows, .cols = cols, .groups = groups, .bits = static_cast<int>(bits)};
  c.group_of = gptq_groups(parts, config, cols, groups);
  c.scales = floats_of(scales);
  c.scale_row_step = 1;
  c.scale_group_step = rows;
  const uint32_t mask = (1u << bits) - 1;
  c.codes = [=, data = packed.data](int64_t first, int64_t count, uint8_t* out) {
    for (int64_t word = 0; word < cols / per; ++word) {
      for (int64_t r = 0; r < count; ++r) {
        uint32_t word_bits = load_number<uint32_t>(data, word * rows + first + r);
        for (int64_t j = 0; j < per; ++j, word_bits >>= bits) {
          out[r * cols + word * per + j] = static_cast<uint8_t>(word_bits & mask);
        }
      }
    }
  };
  const uint32_t added = text_or(config, "checkpoint_format", "gptq") == "gptq_v2" ? 0 : 1;
  c.zero = [=, data = zeros.data](int64_t row, int64_t group) {
    const uint32_t word = load_number<uint32_t>(data, group * (rows / per) + row / per);
    return static_cast<int>(((word >> (bits * (row % per))) + added) & mask);
  };
  // Symmetric files have one zero point everywhere: all words are the same.
  uint32_t fixed = 0;
  for (int64_t j = 0; j < per; ++j) fixed |= ((1u << (bits - 1)) - added) << (bits * j);
  for (int64_t i = 0; i < elements_of(zeros) && c.fixed_zero; ++i) {
    c.fixed_zero = load_number<uint32_t>(zeros.data, i) == fixed;
  }
  const DType type = exact_type(c);
  return {parts.name("qweight"), fmt::format("gptq, {} bits", bits), type, make_rows(std::move(c))};
}

}  // namespace millrace
