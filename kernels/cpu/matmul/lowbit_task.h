// How a CPU keeps matrices of four-bit weights (millrace/kernels/lowbit.h), and what products with them hand
// to the kernels of an instruction set (lowbit_panel.h).
//
// A unit is 64 rows x 128 columns, of as many bytes as a GPU's (quant/lowbit_units.h); units lie [expert]
// [row tile of 64][column unit of 128]. Vectors hold a column of sixteen rows, so that a row's sum goes over
// its columns in order.
//     codes    uint32 [16 columns of eight][64 rows], column j of the eight in bits 4j
//     MXFP4    bytes [block of 32][64]: e8m0       NVFP4    bytes [block of 16][64]: e4m3
//     INT4     [group] of: f16 [64] scales, bytes [64] zeros
#pragma once

#include <stdint.h>

namespace millrace::cpu {

enum class LowbitFormat { kMXFP4, kNVFP4, kInt4By32, kInt4By128 };

inline constexpr int kLowbitUnitRows = 64, kLowbitUnitColumns = 128, kLowbitEight = 8;
inline constexpr int kLowbitCodeBytes = kLowbitUnitRows * kLowbitUnitColumns / 2;
inline constexpr int kLowbitInt4GroupBytes = 3 * kLowbitUnitRows;  // f16 scales, then zeros

constexpr int lowbit_group_columns(LowbitFormat format) {
  return format == LowbitFormat::kNVFP4 ? 16 : format == LowbitFormat::kInt4By128 ? 128 : 32;
}
constexpr bool lowbit_is_int4(LowbitFormat format) { return format >= LowbitFormat::kInt4By32; }
constexpr int lowbit_unit_bytes(LowbitFormat format) {
  return kLowbitCodeBytes + kLowbitUnitColumns / lowbit_group_columns(format) *
                                (lowbit_is_int4(format) ? kLowbitInt4GroupBytes : kLowbitUnitRows);
}

// Rows that are multiplied without widened weights in memory between.
inline constexpr int64_t kLowbitFewRows = 8;

// sums[rows][64] = x[rows][columns] times a tile of 64 rows of weights, its units one after the other.
// columns: whole sixteens.
struct LowbitRows {
  LowbitFormat format;
  const uint8_t* units;
  int64_t columns;
  const float* x;
  int64_t x_stride, rows;  // at most kLowbitFewRows
  float* sums;
};

}  // namespace millrace::cpu
