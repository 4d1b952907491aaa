// The layout in which a GPU multiplies matrices of four-bit weights (include/millrace/kernels/lowbit.h; a
// CPU's: cpu/matmul/lowbit_task.h), and how it is made of what is published. Host and device run the same
// code.
//
// A unit is 64 rows x 128 columns in one run of bytes; units lie [expert][row tile of 64][column unit of
// 128]. Rows and columns that are not there have weight zero.
//     codes    uint32 [step 8][warp 4][lane 32]: lane (g, t) = (lane / 4, lane % 4) of row group `warp` has
//              eight codes of columns 16 step and on, as the A operand of a product of 16 x 16 has them:
//                  elements 0, 1: row g, columns 2t, 2t + 1      2, 3: row g + 8
//                  elements 4, 5: row g, columns 2t + 8, + 9     6, 7: row g + 8
//              FP4: the word of e2m1_word.h. INT4: element 2i in bits 4i, 2i + 1 in bits 16 + 4i.
//     MXFP4    bytes [block of 32][warp][g][row g, row g + 8]: the exponent of the bf16 that makes of
//              2^-126 times a code 2^-32 times a weight
//     NVFP4    bytes [step][warp][g][row g, row g + 8]: five bits of exponent (0 is 2^-9), three of mantissa:
//              every e4m3 above zero; where it is zero, codes are
//     INT4     [group] of: f16 [warp][g][row g, row g + 8] scales, bytes [warp][g][row g, row g + 8] zeros
#pragma once

#include <cstdint>

#include "kernels/quant/e2m1_word.h"
#include "millrace/kernels/lowbit.h"

namespace millrace::quant {

inline constexpr int kUnitRows = 64, kUnitColumns = 128;
inline constexpr int kUnitSteps = kUnitColumns / 16;
inline constexpr int kUnitCodeBytes = kUnitRows * kUnitColumns / 2;
inline constexpr int kUnitWords = kUnitCodeBytes / 4;
// Of an INT4 group in a unit: scales, then zeros.
inline constexpr int kInt4ScaleBytes = 2 * kUnitRows, kInt4GroupBytes = 3 * kUnitRows;
// Sums along the columns are cut here, and the segments' sums added in order: that fixes their bits.
inline constexpr int kSegmentUnits = 32;
// What a GPU makes of codes are weights times 2^-32, and so are its sums; this makes them right.
inline constexpr float kLowbitUnscale = 0x1p32f;

MILLRACE_HOST_DEVICE inline constexpr bool is_int4(mr_lowbit_format format) {
  return format == MR_LOWBIT_INT4_32 || format == MR_LOWBIT_INT4_128;
}
MILLRACE_HOST_DEVICE inline constexpr int lowbit_group(mr_lowbit_format format) {
  return format == MR_LOWBIT_NVFP4 ? 16 : format == MR_LOWBIT_INT4_128 ? 128 : 32;
}
MILLRACE_HOST_DEVICE inline constexpr int unit_bytes(mr_lowbit_format format) {
  const int groups = kUnitColumns / lowbit_group(format);
  return kUnitCodeBytes + groups * (is_int4(format) ? kInt4GroupBytes : kUnitRows);
}

struct UnitGrid {  // of one expert
  int64_t row_tiles, column_units;
  MILLRACE_HOST_DEVICE constexpr UnitGrid(int64_t n, int64_t k)
      : row_tiles((n + kUnitRows - 1) / kUnitRows), column_units((k + kUnitColumns - 1) / kUnitColumns) {}
  MILLRACE_HOST_DEVICE constexpr int64_t units() const { return row_tiles * column_units; }
};

// ---------------------------------------------------------------- what is published

MILLRACE_HOST_DEVICE inline uint32_t awq_place(uint32_t i) { return i % 2 * 4 + i / 2; }  // of row i of eight

// The code of row n, column k of an expert: 0 to 15.
MILLRACE_HOST_DEVICE inline uint32_t published_code(const mr_lowbit_matrix& m, int64_t expert, int64_t n,
                                                    int64_t k) {
  if (m.packing == MR_LOWBIT_ROWS) {
    const auto* codes = static_cast<const uint8_t*>(m.codes) + (expert * m.n + n) * (m.k / 2);
    return codes[k / 2] >> (4 * (k % 2)) & 15u;
  }
  const auto* words = static_cast<const uint32_t*>(m.codes) + expert * (m.n * m.k / 8);
  if (m.packing == MR_LOWBIT_AWQ)
    return words[k * (m.n / 8) + n / 8] >> (4 * awq_place(static_cast<uint32_t>(n % 8))) & 15u;
  return words[k / 8 * m.n + n] >> (4 * (k % 8)) & 15u;
}
// The scale's bits of column group `group`.
MILLRACE_HOST_DEVICE inline uint32_t published_scale(const mr_lowbit_matrix& m, int64_t expert, int64_t n,
                                                     int64_t group) {
  const int64_t groups = m.k / lowbit_group(m.format);
  if (m.packing == MR_LOWBIT_ROWS)
    return static_cast<const uint8_t*>(m.scales)[(expert * m.n + n) * groups + group];
  return static_cast<const uint16_t*>(m.scales)[(expert * groups + group) * m.n + n];
}
MILLRACE_HOST_DEVICE inline uint32_t published_zero(const mr_lowbit_matrix& m, int64_t expert, int64_t n,
                                                    int64_t group) {
  const int64_t groups = m.k / lowbit_group(m.format);
  const uint32_t word = static_cast<const uint32_t*>(m.zeros)[(expert * groups + group) * (m.n / 8) + n / 8];
  const auto row = static_cast<uint32_t>(n % 8);
  if (m.packing == MR_LOWBIT_AWQ) return word >> (4 * awq_place(row)) & 15u;
  return (word >> (4 * row) & 15u) + (m.packing == MR_LOWBIT_GPTQ ? 1u : 0u);
}

// ---------------------------------------------------------------- stored scales

// The exponent that is stored of a scale of 2^(e8m0 - 127). What no bf16 holds becomes infinite, and shows.
MILLRACE_HOST_DEVICE inline constexpr uint32_t encode_e8m0(uint32_t e8m0) {
  constexpr uint32_t kOffset = 126 - 32;
  return e8m0 + kOffset < 255 ? e8m0 + kOffset : 255;
}
// As a bf16.
MILLRACE_HOST_DEVICE inline constexpr uint32_t e8m0_bits(uint32_t stored) { return stored << 7; }

// Five bits of exponent and three of mantissa of an e4m3 above zero (its sign is not looked at).
MILLRACE_HOST_DEVICE inline constexpr uint32_t encode_e4m3_scale(uint32_t e4m3) {
  const uint32_t exponent = e4m3 >> 3 & 15u, mantissa = e4m3 & 7u;
  if (exponent > 0) return (exponent + 2) << 3 | mantissa;   // 2^(exponent - 7)
  if (mantissa >= 4) return 2u << 3 | (mantissa & 3u) << 1;  // m * 2^-9
  return mantissa >= 2 ? 1u << 3 | (mantissa & 1u) << 2 : 0u;
}
// As a bf16, 2^94 times what it is: 2^-126 times a code becomes 2^-32 times a weight.
MILLRACE_HOST_DEVICE inline constexpr uint32_t e4m3_scale_bits(uint32_t stored) {
  constexpr uint32_t kOffset = (127 + 94 - 9) << 7;
  return (stored << 4) + kOffset;
}

// ---------------------------------------------------------------- packing

// Row and column, inside the unit, of element i of word `at`.
struct UnitPlace {
  int row, column;
  MILLRACE_HOST_DEVICE constexpr UnitPlace(int at, int i)
      : row(at / 32 % 4 * 16 + at % 32 / 4 + i / 2 % 2 * 8),
        column(at / 128 * 16 + at % 4 * 2 + i % 2 + i / 4 * 8) {}
};

// Word `at` of the unit (row_tile, column_unit).
MILLRACE_HOST_DEVICE inline uint32_t pack_unit_word(const mr_lowbit_matrix& m, int64_t expert,
                                                    int64_t row_tile, int64_t column_unit, int at) {
  uint32_t codes = 0, word = 0;
  for (int i = 0; i < 8; ++i) {
    const UnitPlace place(at, i);
    const int64_t n = row_tile * kUnitRows + place.row, k = column_unit * kUnitColumns + place.column;
    if (n >= m.n || k >= m.k) continue;  // INT4: such groups have scale zero
    uint32_t code = published_code(m, expert, n, k);
    if (m.format == MR_LOWBIT_NVFP4 && (published_scale(m, expert, n, k / 16) & 127u) == 0) code = 0;
    codes |= code << (4 * i);
    word |= code << (i / 2 * 4 + i % 2 * 16);
  }
  return is_int4(m.format) ? word : encode_e2m1(codes);
}
// What lies behind the words, for row `row` of the unit and group `group` of its columns.
MILLRACE_HOST_DEVICE inline void pack_unit_scale(const mr_lowbit_matrix& m, int64_t expert, int64_t row_tile,
                                                 int64_t column_unit, int group, int row, uint8_t* unit) {
  const int size = lowbit_group(m.format);
  const int64_t n = row_tile * kUnitRows + row;
  const int64_t k = column_unit * kUnitColumns + int64_t{group} * size;
  const bool there = n < m.n && k < m.k;
  const int slot = row / 16 * 16 + row % 8 * 2 + row / 8 % 2;  // [warp][g][half]
  if (!is_int4(m.format)) {
    const uint32_t scale = there ? published_scale(m, expert, n, k / size) : 1u;
    unit[kUnitCodeBytes + group * kUnitRows + slot] =
        static_cast<uint8_t>(m.format == MR_LOWBIT_MXFP4 ? encode_e8m0(scale) : encode_e4m3_scale(scale));
    return;
  }
  uint8_t* at = unit + kUnitCodeBytes + group * kInt4GroupBytes;
  const uint32_t scale = there ? published_scale(m, expert, n, k / size) : 0u;
  at[2 * slot] = static_cast<uint8_t>(scale & 255u);
  at[2 * slot + 1] = static_cast<uint8_t>(scale >> 8);
  at[kInt4ScaleBytes + slot] = static_cast<uint8_t>(there ? published_zero(m, expert, n, k / size) : 0u);
}

}  // namespace millrace::quant
