// Products of plain matrices of bf16 and int8, and of bf16 with four-bit weights, by tiles of the AMX unit:
// operands to tiles (dense_task.h), and the product of two panels of tiles.
//
// 32 x 32 outputs at a time: four tiles of sums, two of either operand, four loads for four products. An
// output is a chain over tiles of 32 elements of k in order: in each a sum of the even and one of the odd
// products, by fused multiply-adds in order, added to one another and then to the output. Numbers below
// 2^-126 count as zero. Whatever the blocks: the same bits for any number of rows, columns and threads.
//
// Roofline: a product of two tiles takes sixteen cycles, the loads of its operands as many of the load ports
// beside it.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/dense_few_amx.h"
#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/matmul/lowbit_codes.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// ---------------------------------------------------------------- operands

constexpr int64_t kTileLine = 64;  // bytes

// Sixteen lines of 64 bytes, `stride` apart.
inline void copy_lines(const uint8_t* from, int64_t stride, uint8_t* to) {
  unroll<16>([&](auto r) __attribute__((always_inline)) {
    _mm512_store_si512(to + r * kTileLine, _mm512_loadu_si512(from + r * stride));
  });
}

// The same with dwords turned: dword d of line r becomes dword r of line d. Quarters of lines come to their
// places by loads; shuffles, of which there is one a cycle, are left with what lies within a quarter.
inline void turn_lines(const uint8_t* from, int64_t stride, uint8_t* to) {
  for (int64_t quarter = 0; quarter < 4; ++quarter) {
    const auto part = [&](int64_t r) __attribute__((always_inline)) {
      return Simd::load128(from + r * stride + quarter * 16);
    };
    __m512i lines[4];  // quarters of rows r, r + 4, r + 8, r + 12
    unroll<4>([&](auto r) __attribute__((always_inline)) {
      __m512i v = _mm512_castsi128_si512(part(r));
      v = _mm512_mask_broadcast_i32x4(v, 0x00f0, part(r + 4));
      v = _mm512_mask_broadcast_i32x4(v, 0x0f00, part(r + 8));
      lines[r] = _mm512_mask_broadcast_i32x4(v, 0xf000, part(r + 12));
    });
    const __m512i low = _mm512_unpacklo_epi32(lines[0], lines[1]),
                  high = _mm512_unpackhi_epi32(lines[0], lines[1]),
                  low2 = _mm512_unpacklo_epi32(lines[2], lines[3]),
                  high2 = _mm512_unpackhi_epi32(lines[2], lines[3]);
    uint8_t* const at = to + quarter * 4 * kTileLine;
    _mm512_store_si512(at, _mm512_unpacklo_epi64(low, low2));
    _mm512_store_si512(at + kTileLine, _mm512_unpackhi_epi64(low, low2));
    _mm512_store_si512(at + 2 * kTileLine, _mm512_unpacklo_epi64(high, high2));
    _mm512_store_si512(at + 3 * kTileLine, _mm512_unpackhi_epi64(high, high2));
  }
}

// Where the bytes of a line of sixteen dwords come from: of two rows of sixteen words, or four of bytes.
struct JoinOrder {
  uint8_t byte[2][64];  // [words, bytes]
};
constexpr JoinOrder make_join_order() {
  JoinOrder order{};
  for (int i = 0; i < 64; ++i) {
    order.byte[0][i] = static_cast<uint8_t>(i % 4 / 2 * 32 + i / 4 * 2 + i % 2);
    order.byte[1][i] = static_cast<uint8_t>(i % 4 * 16 + i / 4);
  }
  return order;
}
alignas(64) constexpr JoinOrder kJoinOrder = make_join_order();

// Rows of sixteen elements, those of k in order, to sixteen lines of dwords.
inline void join_words(const uint8_t* from, int64_t stride, uint8_t* to) {
  const __m512i order = _mm512_load_si512(kJoinOrder.byte[0]);
  unroll<16>([&](auto d) __attribute__((always_inline)) {
    const uint8_t* const row = from + 2 * d * stride;
    const __m512i both =
        _mm512_inserti64x4(_mm512_castsi256_si512(Simd::load256(row)), Simd::load256(row + stride), 1);
    _mm512_store_si512(to + d * kTileLine, _mm512_permutexvar_epi8(order, both));
  });
}
inline void join_bytes(const uint8_t* from, int64_t stride, uint8_t* to) {
  const __m512i order = _mm512_load_si512(kJoinOrder.byte[1]);
  unroll<16>([&](auto d) __attribute__((always_inline)) {
    const uint8_t* const row = from + 4 * d * stride;
    __m512i all = _mm512_castsi128_si512(Simd::load128(row));
    all = _mm512_inserti32x4(all, Simd::load128(row + stride), 1);
    all = _mm512_inserti32x4(all, Simd::load128(row + 2 * stride), 2);
    all = _mm512_inserti32x4(all, Simd::load128(row + 3 * stride), 3);
    _mm512_store_si512(to + d * kTileLine, _mm512_permutexvar_epi8(order, all));
  });
}

// Calls pack(from, stride, to) with each tile's elements where they lie, or among zeros where some do not
// exist.
template <class Pack>
[[gnu::always_inline]] inline void each_tile(const DenseTileOperand& op, const Pack& pack) {
  const int64_t of_k = kDenseTileDepth / op.element_bytes;  // elements
  const int64_t across = op.along_k ? of_k : kTileHeight, down = op.along_k ? kTileHeight : of_k;
  const int64_t columns = op.along_k ? op.depth : op.outer, rows = op.along_k ? op.outer : op.depth;
  alignas(64) uint8_t padded[kDenseTileDepth * kTileLine];
  for (int64_t r = 0; r < rows; r += down) {
    for (int64_t c = 0; c < columns; c += across) {
      const uint8_t* const from = op.from + r * op.stride + c * op.element_bytes;
      const int64_t group = op.along_k ? r / down : c / across, tile = op.along_k ? c / across : r / down;
      uint8_t* const to = op.to + group * op.group_bytes + tile * kDenseTileBytes;
      if (op.ahead != 0 && (op.along_k || c * op.element_bytes % kTileLine == 0)) {
        for (int64_t i = 0; i < down; ++i) __builtin_prefetch(from + i * op.stride + op.ahead, 0, 2);
      }
      if (rows - r >= down && columns - c >= across) {
        pack(from, op.stride, to);
        continue;
      }
      const int64_t some_rows = rows - r < down ? rows - r : down,
                    some = columns - c < across ? columns - c : across;
      __builtin_memset(padded, 0, sizeof padded);
      for (int64_t i = 0; i < some_rows; ++i) {
        __builtin_memcpy(padded + i * kTileLine, from + i * op.stride,
                         static_cast<size_t>(some * op.element_bytes));
      }
      pack(padded, kTileLine, to);
    }
  }
}

// Tiles [16 rows][64 bytes of k].
void dense_tile_rows(const DenseTileOperand& op) {
  if (op.along_k) return each_tile(op, copy_lines);
  each_tile(op, [&](const uint8_t* from, int64_t stride, uint8_t* to) {
    alignas(64) uint8_t joined[kDenseTileBytes];
    op.element_bytes == 2 ? join_words(from, stride, joined) : join_bytes(from, stride, joined);
    turn_lines(joined, kTileLine, to);
  });
}
// Tiles [16 dwords of k][16 columns].
void dense_tile_columns(const DenseTileOperand& op) {
  if (op.along_k) return each_tile(op, turn_lines);
  op.element_bytes == 2 ? each_tile(op, join_words) : each_tile(op, join_bytes);
}

// ---------------------------------------------------------------- products

// 0 to 3 are sums [row group][column group], 4 and 5 rows, 6 and 7 columns.
inline void configure_dense_tiles(int64_t height) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = kTileLine;
    config.rows[t] = static_cast<uint8_t>(t < 6 ? height : 16);
  }
  compiler_fence();
  _tile_loadconfig(&config);
}

template <bool kInt8, bool kTwoRows, bool kTwoColumns>
void dense_tile_block(const DenseTiles& t, int64_t row, int64_t column) {
  constexpr int64_t kStride = kDenseLanes * 4;  // of sums, bytes
  const uint8_t *a = t.a + row * t.group_bytes, *b = t.b + column * t.group_bytes;
  uint8_t* const c = static_cast<uint8_t*>(t.sums) + row * kTileHeight * kStride + column * kTileLine;
  uint8_t* const below = c + kTileHeight * kStride;
  if (t.add) {
    _tile_loadd(0, c, kStride);
    if constexpr (kTwoColumns) _tile_loadd(1, c + kTileLine, kStride);
    if constexpr (kTwoRows) _tile_loadd(2, below, kStride);
    if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, below + kTileLine, kStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < t.tiles; ++k, a += kDenseTileBytes, b += kDenseTileBytes) {
    _tile_loadd(4, a, kTileLine);
    _tile_loadd(6, b, kTileLine);
    if constexpr (kInt8) {
      _tile_dpbssd(0, 4, 6);
    } else {
      _tile_dpbf16ps(0, 4, 6);
    }
    if constexpr (kTwoColumns) {
      _tile_loadd(7, b + t.group_bytes, kTileLine);
      if constexpr (kInt8) {
        _tile_dpbssd(1, 4, 7);
      } else {
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    if constexpr (!kTwoRows) continue;
    _tile_loadd(5, a + t.group_bytes, kTileLine);
    if constexpr (kInt8) {
      _tile_dpbssd(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, kStride);
  if constexpr (kTwoColumns) _tile_stored(1, c + kTileLine, kStride);
  if constexpr (kTwoRows) _tile_stored(2, below, kStride);
  if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, below + kTileLine, kStride);
}

template <bool kInt8, bool kTwoColumns>
void dense_tile_strip(const DenseTiles& t, int64_t column) {
  const int64_t groups = (t.rows + kTileHeight - 1) / kTileHeight;
  int64_t row = 0;
  for (; row + 2 <= groups; row += 2) dense_tile_block<kInt8, true, kTwoColumns>(t, row, column);
  if (row < groups) dense_tile_block<kInt8, false, kTwoColumns>(t, row, column);
}
template <bool kInt8>
void dense_tile_strips(const DenseTiles& t) {
  const int64_t groups = (t.columns + kLanes - 1) / kLanes;
  int64_t column = 0;
  for (; column + 2 <= groups; column += 2) dense_tile_strip<kInt8, true>(t, column);
  if (column < groups) dense_tile_strip<kInt8, false>(t, column);
}

void dense_tile_products(const DenseTiles& t) {
  configure_dense_tiles(t.rows < kTileHeight ? t.rows : kTileHeight);
  t.int8 ? dense_tile_strips<true>(t) : dense_tile_strips<false>(t);
  _tile_release();
  compiler_fence();
}

// ---------------------------------------------------------------- four-bit weights

// Columns [0, columns) of a unit, whole sixteens, as tiles of columns of the product: the unit's 64 rows are
// four groups. Columns up to the next 32 become zero.
template <LowbitFormat kFormat>
void lowbit_tiles_of(const uint8_t* unit, int64_t columns, uint8_t* to, int64_t group_bytes) {
  for (int row = 0; row < kLowbitUnitRows; row += kLanes) {
    uint8_t* const group = to + row / kLanes * group_bytes;
    __m512i even = _mm512_setzero_si512();
    each_lowbit_column<kFormat, 1>(
        unit, row, columns, [&](int64_t c, const V16(&w)[1]) __attribute__((always_inline)) {
          const __m512i bits = _mm512_castps_si512(w[0]);  // a bf16, and zeros
          if (c % 2 == 0) {
            even = _mm512_srli_epi32(bits, 16);
          } else {
            _mm512_store_si512(group + c / 2 * kTileLine, _mm512_or_si512(bits, even));
          }
        });
    if (columns % 32 != 0) __builtin_memset(group + columns / 2 * kTileLine, 0, kDenseTileBytes / 2);
  }
}
void lowbit_tiles(LowbitFormat format, const uint8_t* unit, int64_t columns, uint8_t* to,
                  int64_t group_bytes) {
  switch (format) {
    case LowbitFormat::kMXFP4:
      return lowbit_tiles_of<LowbitFormat::kMXFP4>(unit, columns, to, group_bytes);
    case LowbitFormat::kNVFP4:
      return lowbit_tiles_of<LowbitFormat::kNVFP4>(unit, columns, to, group_bytes);
    case LowbitFormat::kInt4By32:
      return lowbit_tiles_of<LowbitFormat::kInt4By32>(unit, columns, to, group_bytes);
    case LowbitFormat::kInt4By128:
      return lowbit_tiles_of<LowbitFormat::kInt4By128>(unit, columns, to, group_bytes);
  }
}

// One row in the order of tiles, by vectors: weights never leave the registers, which is twice as fast.
template <LowbitFormat kFormat>
[[gnu::noinline]] void lowbit_one_row_of(const LowbitRows& t) {
  constexpr int kGroups = kLowbitUnitRows / kLanes;
  V16 total[kGroups], part[2][kGroups];
  unroll<kGroups>([&](auto g) { total[g] = part[0][g] = part[1][g] = Simd::zero(); });
  const auto end_tile = [&]() __attribute__((always_inline)) {
    unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
      total[g] = Simd::add(total[g], Simd::add(part[0][g], part[1][g]));
      part[0][g] = part[1][g] = Simd::zero();
    });
  };
  const uint8_t* unit = t.units;
  for (int64_t k = 0; k < t.columns; k += kLowbitUnitColumns, unit += lowbit_unit_bytes(kFormat)) {
    const int64_t columns = t.columns - k < kLowbitUnitColumns ? t.columns - k : kLowbitUnitColumns;
    each_lowbit_column<kFormat, kGroups>(
        unit, 0, columns, [&](int64_t c, const V16(&w)[kGroups]) __attribute__((always_inline)) {
          const V16 by = Simd::broadcast(t.x[k + c]);
          unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
            part[c % 2][g] = Simd::fma(w[g], by, part[c % 2][g]);
          });
          if (c % 32 == 31) end_tile();
        });
  }
  if (t.columns % 32 != 0) end_tile();
  unroll<kGroups>([&](auto g) { Simd::store(t.sums + g * kLanes, total[g]); });
}
void lowbit_one_row(const LowbitRows& t) {
  const SubnormalsAreZero mode;
  switch (t.format) {
    case LowbitFormat::kMXFP4:
      return lowbit_one_row_of<LowbitFormat::kMXFP4>(t);
    case LowbitFormat::kNVFP4:
      return lowbit_one_row_of<LowbitFormat::kNVFP4>(t);
    case LowbitFormat::kInt4By32:
      return lowbit_one_row_of<LowbitFormat::kInt4By32>(t);
    case LowbitFormat::kInt4By128:
      return lowbit_one_row_of<LowbitFormat::kInt4By128>(t);
  }
}

constexpr DenseTileKernels make_dense_tile_kernels() {
  return {dense_tile_rows, dense_tile_columns, dense_tile_products,
          lowbit_tiles,    lowbit_one_row,     dense_few_as_tiles};
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
