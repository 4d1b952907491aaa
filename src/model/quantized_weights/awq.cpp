// AWQ, layout "gemm": codes of 4 bits, eight rows of one column in each word, in an order of their own.
//   qweight I32 [cols, rows / 8]     qzeros I32 [groups, rows / 8]     scales [groups, rows]
// Zero points are as they are: value = (code - zero) * scale.
#include <fmt/core.h>

#include <array>

#include "model/quantized_weights/integer_codes.h"
#include "model/quantized_weights/schemes.h"

namespace millrace {
namespace {

constexpr int64_t kPerWord = 8;
// Nibble n of a word belongs to row 0 2 4 6 1 3 5 7 of the eight: where row r's nibble is.
constexpr std::array<int, kPerWord> kNibbleOfRow = {0, 4, 1, 5, 2, 6, 3, 7};

// 128 is the default of those who write it.
int64_t awq_group_size(const nlohmann::json& config, int64_t cols) {
  const int64_t size = integer_or(config, "group_size", integer_or(config, "q_group_size", 128));
  return size > 0 ? size : cols;
}

}  // namespace

QuantizedWeight read_awq(const Parts& parts, const nlohmann::json& config, int64_t rows, int64_t cols) {
  if (rows % kPerWord != 0) {
    parts.fail("qweight", fmt::format("{} rows", rows), fmt::format("a multiple of {}", kPerWord));
  }
  const int64_t words = rows / kPerWord, size = awq_group_size(config, cols);
  const int64_t groups = (cols + size - 1) / size;
  const io::StoredTensor& packed = parts.require("qweight", {"I32"}, {cols, words});
  const io::StoredTensor& zeros = parts.require("qzeros", {"I32"}, {groups, words});
  const io::StoredTensor& scales = parts.require("scales", {"F16", "BF16", "F32"}, {groups, rows});

  IntegerCodes c{.rows = rows, .cols = cols, .groups = groups, .bits = 4, .fixed_zero = false};
  c.group_of = groups_in_order(cols, size);
  c.scales = floats_of(scales);
  c.scale_row_step = 1;
  c.scale_group_step = rows;
  const auto nibble = [](uint32_t word, int64_t row) {
    return word >> (4 * kNibbleOfRow[row % kPerWord]) & 15u;
  };
  c.codes = [=, data = packed.data](int64_t first, int64_t count, uint8_t* out) {
    for (int64_t col = 0; col < cols; ++col) {
      for (int64_t r = 0; r < count; ++r) {
        const uint32_t word = load_number<uint32_t>(data, col * words + (first + r) / kPerWord);
        out[r * cols + col] = static_cast<uint8_t>(nibble(word, first + r));
      }
    }
  };
  c.zero = [=, data = zeros.data](int64_t row, int64_t group) {
    return static_cast<int>(nibble(load_number<uint32_t>(data, group * words + row / kPerWord), row));
  };
  const DType type = exact_type(c);
  return {parts.name("qweight"), "awq, 4 bits", type, make_rows(std::move(c))};
}

}  // namespace millrace
