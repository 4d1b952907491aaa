// Products of a few rows of bf16 with a matrix whose rows are those of k, by vectors in the order of AMX
// tiles (dense_amx.h): a sum of the even and one of the odd products of every 32 of k, added to one another
// and then to the output. The bits of tiles, without packing each element for a single use.
//
// Roofline of one row: 32 bytes are a widening load, a shift and a fused multiply-add, a cycle and a half,
// where a core reads 3 to 6 bytes a cycle.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// As tiles do: numbers below 2^-126 are zero, read or written.
class SubnormalsAreZero {
 public:
  SubnormalsAreZero() : before_(_mm_getcsr()) {
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
    _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero);
  }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
  unsigned before_;
};

constexpr int64_t kFewTileDepth = 32;  // elements of k in a tile

// Elements `parity`, parity + 2 ... of `depth` of a tile, of kM rows by kN sixteens of columns, of the last
// of which `count` exist. What the next tile has in the same rows is prefetched.
template <int kM, int kN>
[[gnu::always_inline]] inline void few_chain(const DenseFew& t, const float* x, const uint8_t* b, int parity,
                                             int64_t depth, int64_t count, bool prefetch,
                                             V16 (&sum)[kM][kN]) {
  unroll<kM>([&](auto m) { unroll<kN>([&](auto n) { sum[m][n] = Simd::zero(); }); });
  for (int64_t i = parity; i < depth; i += 2) {
    const auto* from = reinterpret_cast<const uint16_t*>(b + i * t.stride);
    if (prefetch) {
      unroll<(kN + 1) / 2>(
          [&](auto line) { __builtin_prefetch(b + (i + kFewTileDepth) * t.stride + 64 * line, 0, 2); });
    }
    V16 by[kM];
    unroll<kM>([&](auto m) { by[m] = Simd::broadcast(x[m * t.x_stride + i]); });
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      const V16 v = n == kN - 1 && count < kLanes ? load_tail<LoadBF16>(from + n * kLanes, count)
                                                  : Simd::load_bf16(from + n * kLanes);
      unroll<kM>([&](auto m) __attribute__((always_inline)) { sum[m][n] = Simd::fma(v, by[m], sum[m][n]); });
    });
  }
  if (depth < kFewTileDepth) {  // products of zeros, of which a tile has the rest
    unroll<kM>([&](auto m) { unroll<kN>([&](auto n) { sum[m][n] = Simd::add(sum[m][n], Simd::zero()); }); });
  }
}

// Elements [k, k + depth) of k, of a tile.
template <int kM, int kN>
[[gnu::noinline]] void few_tile(const DenseFew& t, int64_t row, int64_t column, int64_t k, int64_t depth,
                                int64_t count) {
  const float* const x = t.x + row * t.x_stride + k;
  const uint8_t* const b = t.b + k * t.stride + 2 * column;
  V16 even[kM][kN], odd[kM][kN];
  few_chain(t, x, b, 0, depth, count, row == 0, even);
  few_chain(t, x, b, 1, depth, count, row == 0, odd);
  const bool first = k == 0 && !t.add;
  unroll<kM>([&](auto m) __attribute__((always_inline)) {
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      const int64_t at = column + n * kLanes;
      float* const to =
          t.sums + at / kDenseLanes * t.sums_stride + (row + m) * kDenseLanes + at % kDenseLanes;
      const V16 before = first ? Simd::zero() : Simd::load(to);
      Simd::store(to, Simd::add(before, Simd::add(even[m][n], odd[m][n])));
    });
  });
}

// Columns [column, end) of kM rows: sixteen sums at once.
template <int kM>
void few_strip(const DenseFew& t, int64_t row, int64_t column, int64_t end, int64_t k, int64_t depth) {
  constexpr int kN = 16 / kM;
  for (; column + kN * kLanes <= end; column += kN * kLanes)
    few_tile<kM, kN>(t, row, column, k, depth, kLanes);
  for (; column < end; column += kLanes) few_tile<kM, 1>(t, row, column, k, depth, end - column);
}

// A strip of the matrix is read from memory once, for all rows: 32 rows of it stay in the cache.
void dense_few_as_tiles(const DenseFew& t) {
  constexpr int64_t kStrip = 256;  // columns
  const SubnormalsAreZero mode;
  for (int64_t column = 0; column < t.columns; column += kStrip) {
    const int64_t end = t.columns - column < kStrip ? t.columns : column + kStrip;
    for (int64_t k = 0; k < t.depth; k += kFewTileDepth) {
      const int64_t depth = t.depth - k < kFewTileDepth ? t.depth - k : kFewTileDepth;
      int64_t row = 0;
      for (; row + 4 <= t.rows; row += 4) few_strip<4>(t, row, column, end, k, depth);
      for (; row + 2 <= t.rows; row += 2) few_strip<2>(t, row, column, end, k, depth);
      if (row < t.rows) few_strip<1>(t, row, column, end, k, depth);
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
