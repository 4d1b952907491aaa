// Products of block-quantized weights with many rows of activations (prompts): weights are repacked once into
// a small scratch, in the layout of AMX tiles, and multiplied with all the rows from there.
//
// Packed: repacked into the layout of tiles. Loops, outermost first: 256 rows of activations; 64 rows of
// weights; 8 runs of 32 columns, packed as signed codes (18 KiB, first-level cache); the rows of activations,
// 8 or 16 at a time; 16 rows of weights; the runs. So a packed chunk is used by every activation row while it
// is close. The sums leave their registers once per 8 runs, for a scratch of their own: outputs lie far
// apart, often at a power of two, where sixteen of them share a cache set.
//
// Roofline: integer operations. Here 16 x 8 outputs per run are 64 vpdpbusd and 24 float operations on two
// ports: 44 cycles, 186 int8 operations per cycle, which is 73% of what vpdpbusd alone would do.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/dot_x86.h"
#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/matmul/gemv_x86.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/rows_x86.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

// kRows rows over a chunk. Q6_K's codes times their integer scales have 13 bits: two digits of 6 and 7 bits,
// so that the sum is 64 * high + low.
template <int kDigitCount, bool kWithMin, int kLargest, int kMore, bool kSignedCodes>
struct PackedGroup {
  static constexpr int kDigits = kDigitCount;
  static constexpr bool kMin = kWithMin, kSigned = kSignedCodes;
  using Run = RunOfCodes<kLargest, kMore>;  // of vectors
  alignas(64) int8_t codes[kPackedRuns][kDigits][8][4 * kRows];
  alignas(64) float d[kPackedRuns][kRows];
  alignas(64) float m[kMin ? kPackedRuns : 1][kRows];
};
// For vectors: as a GEMV unpacks them, and digits as codes of eight bits are.
template <class Format>
using PackedOf = PackedGroup<Format::kHalves ? 2 : 1, Format::kMin, Format::kHalves ? 255 : Format::kMaxCode,
                             Format::kHalves ? 128 : Format::kOffset,
                             (Format::kHalves ? RunOfCodes<255, 128>::kSigned : RunOf<Format>::kSigned)>;
// For tiles, which take signed codes.
template <class Format>
using PackedForTiles = PackedGroup<Format::kHalves ? 2 : 1, Format::kMin, 255, 128, true>;

// Prefetches the next chunk of the rows, to the second-level cache, a few rows at every step: what lies
// behind it in a row is prefetched with the next chunk. kRows rows that are interleaved have theirs together.
struct ChunkPrefetch {
  const uint8_t* at;
  int64_t apart, rows, bytes, per_step;  // per_step: rows
  int64_t in_group = 0, group_apart = 0;
  ChunkPrefetch(const MatrixView& w, bool interleaved, int64_t row, int64_t num_rows, int64_t byte,
                int64_t chunk_bytes, int64_t steps)
      : at(w.data + row * w.row_bytes + (interleaved ? kRows : 1) * byte),
        apart(interleaved ? chunk_bytes : w.row_bytes),
        rows(num_rows),
        bytes(chunk_bytes),
        per_step((num_rows + steps - 1) / steps),
        group_apart(interleaved ? kRows * (w.row_bytes - chunk_bytes) : 0) {}
  void prefetch() {
    for (int64_t r = 0; r < per_step && rows > 0; ++r, --rows, at += apart) {
      for (int64_t line = 0; line < bytes + 64; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T1);
      }
      if (++in_group == kRows) {
        at += group_apart;
        in_group = 0;
      }
    }
  }
};

// Groups of one chunk, beside each other in the first-level cache, and the sums of a pass.
constexpr int64_t kGroups = 64 / kRows, kPassRows = 256;
template <class P>
struct PackedRows {
  P groups[kGroups];
  alignas(64) float sums[kGroups][kPassRows][kRows];
  int64_t count;  // of groups in use
};

// (code * scale of its row) as high * 64 + low, low in [0, 63].
[[gnu::always_inline]] inline void split_digits(V codes, V scale, V* high, V* low) {
  const V even = signed_right16(shift_left16(codes, 8), 8), odd = signed_right16(codes, 8);
  const V both = bit_or(bit_and(scale, dwords_of(0xffff)), shift_left32(scale, 16));
  const V pe = mul16(even, both), po = mul16(odd, both);
  const V byte = words_of(0xff);
  const auto join = [&](V e, V o) { return bit_or(bit_and(e, byte), shift_left16(o, 8)); };
  *high = join(signed_right16(pe, 6), signed_right16(po, 6));
  *low = join(bit_and(pe, words_of(63)), bit_and(po, words_of(63)));
}

template <class Format, class P, int kPart>
[[gnu::always_inline]] inline void pack_run(typename Format::Block& block, int group, const V* half_scales,
                                            int8_t (*to)[8][4 * kRows]) {
  V u[8];
  block.template unpack<kPart, P::kSigned || Format::kHalves>(u, group);
  unroll<8>([&](auto j) {
    if constexpr (Format::kHalves) {
      V high, low;
      split_digits(u[j], Format::Block::template half_scale<kPart>(half_scales, group, j / 4), &high, &low);
      const V offset = bytes_of(P::kSigned ? 0 : 128);
      store_bytes(to[0][j], bit_xor(high, offset));
      store_bytes(to[1][j], bit_xor(low, offset));
    } else {
      store_bytes(to[0][j], u[j]);
    }
  });
}

template <class Format, class P>
void pack_chunk(const RowPointers& rows, int64_t first, int64_t count, P& to) {
  Format::scales(rows.scales, first, count, to.d[0], to.m[0]);
  if constexpr (Format::kRuns == 1) {
    for (int64_t i = 0; i < count; ++i) {
      typename Format::Block block{rows.codes, (first + i) * Format::kBlockBytes};
      pack_run<Format, P, 0>(block, 0, nullptr, to.codes[i]);
    }
  } else {
    for (int64_t b = 0; b < count; b += 8) {
      typename Format::Block block{rows.codes, (first + b) / 8 * Format::kBlockBytes};
      V halves[4];
      if constexpr (Format::kHalves) block.load_half_scales(halves);
      each_run<Format, false>([&](auto part, int group) __attribute__((always_inline)) {
        pack_run<Format, P, part>(block, group, halves, to.codes[b + Format::kParts * group + part]);
      });
    }
  }
}

// kM rows of activations by kRows packed rows over `runs` runs, added to sums [kM][kRows] (or beginning
// them).
template <class P, int kM>
void vector_runs(const P& w, int64_t first, int64_t runs, const Panel& panel, int64_t m0,
                 float (*sums)[kRows]) {
  const ActivationBlock* x[kM];
  F acc[kM];
  unroll<kM>([&](auto i) {
    x[i] = reinterpret_cast<const ActivationBlock*>(panel_row(panel, m0 + i)) + first;
    acc[i] = first == 0 ? zero_floats() : load_floats(sums[i]);
  });
  for (int64_t b = 0; b < runs; ++b) {
    V sum[kM];
    P::Run::template dots<kM>(
        [&](auto j) __attribute__((always_inline)) { return load_bytes(w.codes[b][0][j]); }, x, b, sum);
    if constexpr (P::kDigits == 2) {
      V low[kM];
      P::Run::template dots<kM>(
          [&](auto j) __attribute__((always_inline)) { return load_bytes(w.codes[b][P::kDigits - 1][j]); }, x,
          b, low);
      unroll<kM>([&](auto i) { sum[i] = add32(shift_left32(sum[i], 6), low[i]); });
    }
    add_scaled<P::kMin, kM>(sum, w.d[b], w.m[P::kMin ? b : 0], x, b, acc);
  }
  unroll<kM>([&](auto i) { store_floats(sums[i], acc[i]); });
}

template <class P>
void multiply_by_vectors(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                         ChunkPrefetch& ahead) {
  int64_t m = 0;
  const auto passes = [&](auto size) {
    for (; m + size <= num_m; m += size) {
      ahead.prefetch();
      for (int64_t g = 0; g < w.count; ++g) {
        vector_runs<P, size>(w.groups[g], first, runs, x, m, w.sums[g] + m);
      }
    }
  };
  if constexpr (kRows == 16) passes(Index<8>{});
  passes(Index<4>{});
  passes(Index<2>{});
  passes(Index<1>{});
}

// Products of one chunk of packed weights with rows [0, num_m), into the sums.
template <class P>
using MultiplyFn = void (*)(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                            ChunkPrefetch& ahead);

// Up to 64 rows of weights by up to kPassRows rows of activations. The outputs of the first `skip` rows, less
// than kRows, are nobody's: interleaved rows are packed as they lie together.
template <class Format, class P>
void packed_pass(const MatrixView& w, int64_t row, int64_t num_rows, int64_t skip, int64_t rows_after,
                 bool first_pass, const Panel& x, int64_t num_m, float* out, int64_t out_stride,
                 PackedRows<P>& packed, MultiplyFn<P> multiply) {
  const int64_t runs = w.cols / kQuantBlock, steps = (num_m + 15) / 16;
  constexpr int64_t kChunkRowBytes = kPackedRuns / Format::kRuns * Format::kBlockBytes;
  RowPointers rows[kGroups];
  packed.count = (num_rows + kRows - 1) / kRows;
  for (int64_t g = 0; g < packed.count; ++g)
    point_at<Format>(w, row + kRows * g, num_rows - kRows * g, rows[g]);
  constexpr bool kInterleaved = Format::kInterleaved;
  if (first_pass) ChunkPrefetch(w, kInterleaved, row, num_rows, 0, kChunkRowBytes, 1).prefetch();
  for (int64_t at = 0; at < runs; at += kPackedRuns) {
    const int64_t count = runs - at < kPackedRuns ? runs - at : kPackedRuns;
    for (int64_t g = 0; g < packed.count; ++g) pack_chunk<Format>(rows[g], at, count, packed.groups[g]);
    const bool more = at + kPackedRuns < runs;  // else the next rows' first chunk
    const int64_t next = more ? num_rows : rows_after < kRows * kGroups ? rows_after : kRows * kGroups;
    ChunkPrefetch ahead(w, kInterleaved, more ? row : row + num_rows, next,
                        more ? (at + kPackedRuns) / Format::kRuns * Format::kBlockBytes : 0, kChunkRowBytes,
                        steps);
    multiply(packed, at, count, x, num_m, ahead);
  }
  for (int64_t g = 0; g < packed.count; ++g) {
    for (int64_t m = 0; m < num_m; ++m) {
      float* const to = out + m * out_stride + kRows * g;
      if (kInterleaved && skip > kRows * g) {
        store_lanes(to, load_floats(packed.sums[g][m]), skip, num_rows < kRows ? num_rows : kRows);
      } else {
        store_rows(to, load_floats(packed.sums[g][m]), num_rows - kRows * g);
      }
    }
  }
}

template <class Format, class P>
void packed_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                   float* out, int64_t out_stride, MultiplyFn<P> multiply) {
  PackedRows<P> packed;
  const int64_t skip = Format::kInterleaved ? first % kRows : 0;
  for (int64_t m = 0; m < num_m; m += kPassRows) {
    Panel part = x;
    if (x.index != nullptr) {
      part.index += m;
    } else {
      part.data += m * x.row_bytes;
    }
    const int64_t count_m = num_m - m < kPassRows ? num_m - m : kPassRows;
    for (int64_t r = -skip; r < num_rows; r += kRows * kGroups) {
      const int64_t count = num_rows - r < kRows * kGroups ? num_rows - r : kRows * kGroups;
      packed_pass<Format>(w, first + r, count, r < 0 ? -r : 0, num_rows - r - count, r <= 0 && m == 0, part,
                          count_m, out + m * out_stride + r, out_stride, packed, multiply);
    }
  }
}

template <class Format>
void quantized_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                      float* out, int64_t out_stride) {
  if (num_m <= kMaxGemvRows) {
    gemv<Format>(w, first, num_rows, x, num_m, out, out_stride);
  } else {
    packed_matmul<Format, PackedOf<Format>>(w, first, num_rows, x, num_m, out, out_stride,
                                            multiply_by_vectors<PackedOf<Format>>);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
