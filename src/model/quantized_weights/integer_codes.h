// Integer codes of up to eight bits with a scale and a zero point per group of columns: what GPTQ, AWQ and
// compressed-tensors store, each packed its own way. value = (code - zero) * scale.
//
// Codes less their zero points are small integers again, and GGUF's blocks of 32 hold those with their scale:
//   4 bits around a fixed zero    -8 ..   7   q4_0
//   4 bits, any zero point       -15 ..  15   q5_0
//   8 bits around a fixed zero  -128 .. 127   q8_0
// as long as the scale is an f16 number and the same for 32 columns that follow one another. Columns in the
// order of their activations (act-order) have scales of their own each, and 8 bits with any zero point need a
// ninth: those become floats.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/quantized_weights/parts.h"
#include "model/quantized_weights/quantized_weight.h"

namespace millrace {

struct IntegerCodes {
  int64_t rows = 0, cols = 0, groups = 1;
  int bits = 4;
  bool fixed_zero = true;  // every zero point is 2^(bits - 1)

  std::vector<int32_t> group_of = {};  // [cols]
  // Codes of rows [first, first + count), [count, cols].
  std::function<void(int64_t first, int64_t count, uint8_t* out)> codes = {};
  std::function<int(int64_t row, int64_t group)> zero = {};  // of groups with zero points of their own

  Floats scales = {};                                // F16, BF16 or F32
  int64_t scale_row_step = 0, scale_group_step = 0;  // in scales
};

// The narrowest type that holds every value exactly.
DType exact_type(const IntegerCodes& codes);

std::shared_ptr<const RowReader> make_rows(IntegerCodes codes);

// group_of of groups of `group_size` columns one after the other.
std::vector<int32_t> groups_in_order(int64_t cols, int64_t group_size);

}  // namespace millrace
