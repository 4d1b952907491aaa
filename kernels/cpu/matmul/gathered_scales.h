// Few rows of Q8_0, Q4_0 and Q4_1 where vpgatherdd is quick: the scales of sixteen rows in one instruction.
// Collected through memory they are sixteen loads and as many stores for every 16 x 32 weights, which is a
// third of Q4_1's operations. For `amx` alone: processors with AMX do not have the flaw for whose sake
// gathering was slowed down on those before them, and AMD's take it apart into more operations than it saves.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/formats_x86.h"

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

// Format with the float16 scale (and minimum) that a block of its begins with.
template <class Format>
struct GatheredScales : Format {
  static void scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float* m) {
    const int64_t apart = rows[1] - rows[0];
    // The last rows of a matrix are repeated, and are not.
    if (rows[kRows - 1] - rows[0] != (kRows - 1) * apart) return Format::scales(rows, first, runs, d, m);
    const V row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const V place = mul32(row, dwords_of(static_cast<int32_t>(apart)));
    const uint8_t* from = rows[0] + first * Format::kBlockBytes;
    for (int64_t b = 0; b < runs; ++b, from += Format::kBlockBytes) {
      const V both = _mm512_i32gather_epi32(place, from, 1);  // of Q8_0 and Q4_0 the upper half is codes
      store_floats(d + kRows * b, floats_of_low_halves(both));
      if constexpr (Format::kMin) store_floats(m + kRows * b, floats_of_low_halves(shift_right32(both, 16)));
    }
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
