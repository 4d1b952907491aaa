// Weights with a few rows interleaved, as many as a vector has lanes: what a vector holds lies together, in
// as many bytes. A block of the rows is a block of each: its fields in their order, each cut into units, and
// of every unit those of all rows side by side. Scales are units of their own size, codes units of four
// bytes.
//   Q4_0, Q8_0  d [rows]; codes, [4 or 8][rows] fours
//   Q4_1        d [rows], m [rows]; codes, [4][rows] fours
//   Q5_0, Q5_1  as Q4_0 and Q4_1, with a word of fifth bits before the codes, [rows] fours
//   Q4_Z        d and z, 16 bits [rows]; codes, [4][rows] fours
//   MXFP4       e8m0 [rows]; codes, [4][rows] fours
//   Q4_K        d [rows], dmin [rows]; the words of scales, [3][rows];
//               codes, [4 pairs of runs][8][rows] fours
//   Q5_K        the same with the fifth bits before the codes, [8][rows] fours
//   Q6_K        low bits, [2 halves][2][8][rows] fours; high bits, [2 halves][8][rows] fours;
//               scales, [4][rows] fours (of four rows, ARM's: [16][rows] bytes); d [rows]
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

struct InterleavedLayout {
  struct Field {
    int64_t bytes, unit;
  };
  Format format;  // of the interleaved rows
  Field fields[3];
};

// Of the format of rows that lie one behind the other.
inline std::optional<InterleavedLayout> interleaved_layout(Format format, int64_t rows) {
  switch (format) {
    case Format::kQ8_0:
      return InterleavedLayout{Format::kInterleavedQ8_0, {{2, 2}, {32, 4}}};
    case Format::kQ4_0:
      return InterleavedLayout{Format::kInterleavedQ4_0, {{2, 2}, {16, 4}}};
    case Format::kQ4_1:
      return InterleavedLayout{Format::kInterleavedQ4_1, {{4, 2}, {16, 4}}};
    case Format::kQ5_0:
      return InterleavedLayout{Format::kInterleavedQ5_0, {{2, 2}, {20, 4}}};
    case Format::kQ5_1:
      return InterleavedLayout{Format::kInterleavedQ5_1, {{4, 2}, {20, 4}}};
    case Format::kQ4_Z:
      return InterleavedLayout{Format::kInterleavedQ4_Z, {{2, 2}, {16, 4}}};
    case Format::kMXFP4:
      return InterleavedLayout{Format::kInterleavedMXFP4, {{1, 1}, {16, 4}}};
    case Format::kQ4_K:
      return InterleavedLayout{Format::kInterleavedQ4_K, {{4, 2}, {140, 4}}};
    case Format::kQ5_K:
      return InterleavedLayout{Format::kInterleavedQ5_K, {{4, 2}, {172, 4}}};
    case Format::kQ6_K:
      if (rows == 4) return InterleavedLayout{Format::kInterleavedQ6_K, {{192, 4}, {16, 1}, {2, 2}}};
      return InterleavedLayout{Format::kInterleavedQ6_K, {{208, 4}, {2, 2}}};
    default:
      return std::nullopt;
  }
}

// Units [from, from + bytes) of each of `count` rows.
template <int64_t kUnit>
inline uint8_t* interleave_units(const uint8_t* const* rows, int64_t count, int64_t from, int64_t bytes,
                                 uint8_t* to) {
  for (int64_t i = from; i < from + bytes; i += kUnit) {
    for (int64_t r = 0; r < count; ++r, to += kUnit) std::memcpy(to, rows[r] + i, kUnit);
  }
  return to;
}

// A block of each of `count` rows.
inline void interleave_block(const InterleavedLayout& layout, const uint8_t* const* rows, int64_t count,
                             uint8_t* to) {
  int64_t at = 0;
  for (const auto& [bytes, unit] : layout.fields) {
    to = unit == 4   ? interleave_units<4>(rows, count, at, bytes, to)
         : unit == 2 ? interleave_units<2>(rows, count, at, bytes, to)
                     : interleave_units<1>(rows, count, at, bytes, to);
    at += bytes;
  }
}

}  // namespace millrace::cpu
