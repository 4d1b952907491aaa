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

#include "kernels/cpu/matmul/dot_avx512.h"
#include "kernels/cpu/matmul/formats_avx512.h"
#include "kernels/cpu/matmul/gemv_avx512.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Sixteen rows over a chunk. Q6_K's codes times their integer scales have 13 bits: two digits of 6 and 7
// bits, so that the sum is 64 * high + low.
template <int kDigitCount, bool kWithMin, int kLargest, int kMore>
struct PackedGroup {
  static constexpr int kDigits = kDigitCount, kMaxCode = kLargest, kOffset = kMore;
  static constexpr bool kMin = kWithMin;
  // Codes of eight bits are packed signed, which is 128 less than what vpdpbusd takes; tiles take them so
  // too.
  static constexpr bool kSigned = kMaxCode == 255;
  alignas(64) int8_t codes[kPackedRuns][kDigits][8][64];
  alignas(64) float d[kPackedRuns][16];
  alignas(64) float m[kMin ? kPackedRuns : 1][16];
};
#if defined(MILLRACE_HAS_AVX512_VNNI)
template <class Format>
using PackedOf = PackedGroup<Format::kHalves ? 2 : 1, Format::kMin, 255, 128>;
#else
// Few bits are the quicker ones (dot_avx512.h).
template <class Format>
constexpr bool kPacksUnsigned = Format::kMaxCode <= 64 && !Format::kHalves;
template <class Format>
using PackedOf =
    PackedGroup<Format::kHalves ? 2 : 1, Format::kMin, kPacksUnsigned<Format> ? Format::kMaxCode : 255,
                kPacksUnsigned<Format> ? Format::kOffset : 128>;
#endif

// Prefetches the next chunk of the rows, to the second-level cache, a few rows at every step: what lies
// behind it in a row is prefetched with the next chunk.
struct ChunkPrefetch {
  const uint8_t* at;
  int64_t apart, rows, bytes, per_step;  // per_step: rows
  ChunkPrefetch(const MatrixView& w, int64_t row, int64_t num_rows, int64_t byte, int64_t chunk_bytes,
                int64_t steps)
      : at(w.data + row * w.row_bytes + byte),
        apart(w.row_bytes),
        rows(num_rows),
        bytes(chunk_bytes),
        per_step((num_rows + steps - 1) / steps) {}
  void prefetch() {
    for (int64_t r = 0; r < per_step && rows > 0; ++r, --rows, at += apart) {
      for (int64_t line = 0; line < bytes + 64; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T1);
      }
    }
  }
};

// Groups of one chunk, beside each other in the first-level cache, and the sums of a pass.
constexpr int64_t kGroups = 4, kPassRows = 256;
template <class P>
struct PackedRows {
  P groups[kGroups];
  alignas(64) float sums[kGroups][kPassRows][16];
  int64_t count;  // of groups in use
};

// (code * scale of its row) as high * 64 + low, low in [0, 63].
[[gnu::always_inline]] inline void split_digits(V codes, V scale, V* high, V* low) {
  const V even = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8), odd = _mm512_srai_epi16(codes, 8);
  const V both =
      _mm512_or_si512(_mm512_and_si512(scale, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(scale, 16));
  const V pe = _mm512_mullo_epi16(even, both), po = _mm512_mullo_epi16(odd, both);
  const V byte = _mm512_set1_epi16(0xff);
  const auto join = [&](V e, V o) {
    return _mm512_or_si512(_mm512_and_si512(e, byte), _mm512_slli_epi16(o, 8));
  };
  *high = join(_mm512_srai_epi16(pe, 6), _mm512_srai_epi16(po, 6));
  *low = join(_mm512_and_si512(pe, _mm512_set1_epi16(63)), _mm512_and_si512(po, _mm512_set1_epi16(63)));
}

template <class Format, int kRun>
[[gnu::always_inline]] inline void pack_run(typename Format::Block& block, const V* half_scales,
                                            int8_t (*to)[8][64]) {
  V u[8];
  block.template unpack<kRun, PackedOf<Format>::kSigned>(u);
  unroll<8>([&](auto j) {
    if constexpr (Format::kHalves) {
      V high, low;
      split_digits(u[j], Format::Block::template half_scale<kRun>(half_scales, j / 4), &high, &low);
      _mm512_store_si512(to[0][j], high);
      _mm512_store_si512(to[1][j], low);
    } else {
      _mm512_store_si512(to[0][j], u[j]);
    }
  });
}

template <class Format>
void pack_chunk(const RowPointers& rows, int64_t first, int64_t count, PackedOf<Format>& to) {
  Format::scales(rows.scales, first, count, to.d[0], to.m[0]);
  if constexpr (Format::kRuns == 1) {
    for (int64_t i = 0; i < count; ++i) {
      typename Format::Block block{rows.codes, (first + i) * Format::kBlockBytes};
      pack_run<Format, 0>(block, nullptr, to.codes[i]);
    }
  } else {
    for (int64_t b = 0; b < count; b += 8) {
      typename Format::Block block{rows.codes, (first + b) / 8 * Format::kBlockBytes};
      V halves[4];
      if constexpr (Format::kHalves) block.load_half_scales(halves);
      unroll<8>([&](auto i) { pack_run<Format, i>(block, halves, to.codes[b + i]); });
    }
  }
}

// kM rows of activations by sixteen packed rows over `runs` runs, added to sums [kM][16] (or beginning them).
template <class P, int kM>
void vector_runs(const P& w, int64_t first, int64_t runs, const Panel& panel, int64_t m0, float (*sums)[16]) {
  const ActivationBlock* x[kM];
  V16 acc[kM];
  unroll<kM>([&](auto i) {
    x[i] = reinterpret_cast<const ActivationBlock*>(panel_row(panel, m0 + i)) + first;
    acc[i] = first == 0 ? Simd::zero() : Simd::load(sums[i]);
  });
  for (int64_t b = 0; b < runs; ++b) {
    using Run = RunOfCodes<P::kMaxCode, P::kOffset>;
    Run codes[P::kDigits];
    unroll<P::kDigits>([&](auto digit) {
      unroll<8>([&](auto j) {
        const V packed = _mm512_load_si512(w.codes[b][digit][j]);
        codes[digit].u[j] = P::kSigned && !Run::kSigned ? _mm512_xor_si512(packed, bytes_of(128)) : packed;
      });
      codes[digit].prepare();
    });
    const V16 scale = Simd::load(w.d[b]);
    unroll<kM>([&](auto i) {
      const ActivationBlock& block = x[i][b];
      V isum = codes[0].dot(block);
      if constexpr (P::kDigits == 2) {
        isum = _mm512_add_epi32(_mm512_slli_epi32(isum, 6), codes[P::kDigits - 1].dot(block));
      }
      acc[i] = Simd::fma(_mm512_cvtepi32_ps(isum), Simd::mul(scale, Simd::broadcast(block.scale)), acc[i]);
      if constexpr (P::kMin) {
        acc[i] = Simd::fma(Simd::load(w.m[b]), Simd::broadcast(block.scale * static_cast<float>(block.sum)),
                           acc[i]);
      }
    });
  }
  unroll<kM>([&](auto i) { Simd::store(sums[i], acc[i]); });
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
  passes(Index<8>{});
  passes(Index<4>{});
  passes(Index<2>{});
  passes(Index<1>{});
}

// Products of one chunk of packed weights with rows [0, num_m), into the sums.
template <class P>
using MultiplyFn = void (*)(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                            ChunkPrefetch& ahead);

// Up to 64 rows of weights by up to kPassRows rows of activations.
template <class Format>
void packed_pass(const MatrixView& w, int64_t row, int64_t num_rows, int64_t rows_after, bool first_pass,
                 const Panel& x, int64_t num_m, float* out, int64_t out_stride,
                 PackedRows<PackedOf<Format>>& packed, MultiplyFn<PackedOf<Format>> multiply) {
  const int64_t runs = w.cols / kQuantBlock, steps = (num_m + 15) / 16;
  constexpr int64_t kChunkRowBytes = kPackedRuns / Format::kRuns * Format::kBlockBytes;
  RowPointers rows[kGroups];
  packed.count = (num_rows + 15) / 16;
  for (int64_t g = 0; g < packed.count; ++g) point_at<Format>(w, row + 16 * g, num_rows - 16 * g, rows[g]);
  if (first_pass) ChunkPrefetch(w, row, num_rows, 0, kChunkRowBytes, 1).prefetch();
  for (int64_t at = 0; at < runs; at += kPackedRuns) {
    const int64_t count = runs - at < kPackedRuns ? runs - at : kPackedRuns;
    for (int64_t g = 0; g < packed.count; ++g) pack_chunk<Format>(rows[g], at, count, packed.groups[g]);
    const bool more = at + kPackedRuns < runs;  // else the next rows' first chunk
    const int64_t next = more ? num_rows : rows_after < 16 * kGroups ? rows_after : 16 * kGroups;
    ChunkPrefetch ahead(w, more ? row : row + num_rows, next,
                        more ? (at + kPackedRuns) / Format::kRuns * Format::kBlockBytes : 0, kChunkRowBytes,
                        steps);
    multiply(packed, at, count, x, num_m, ahead);
  }
  for (int64_t g = 0; g < packed.count; ++g) {
    const __mmask16 lanes = first_lanes(num_rows - 16 * g);
    for (int64_t m = 0; m < num_m; ++m) {
      _mm512_mask_storeu_ps(out + m * out_stride + 16 * g, lanes, Simd::load(packed.sums[g][m]));
    }
  }
}

template <class Format>
void packed_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                   float* out, int64_t out_stride, MultiplyFn<PackedOf<Format>> multiply) {
  PackedRows<PackedOf<Format>> packed;
  for (int64_t m = 0; m < num_m; m += kPassRows) {
    Panel part = x;
    if (x.index != nullptr) {
      part.index += m;
    } else {
      part.data += m * x.row_bytes;
    }
    const int64_t count_m = num_m - m < kPassRows ? num_m - m : kPassRows;
    for (int64_t r = 0; r < num_rows; r += 16 * kGroups) {
      const int64_t count = num_rows - r < 16 * kGroups ? num_rows - r : 16 * kGroups;
      packed_pass<Format>(w, first + r, count, num_rows - r - count, r == 0 && m == 0, part, count_m,
                          out + m * out_stride + r, out_stride, packed, multiply);
    }
  }
}

template <class Format>
void quantized_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                      float* out, int64_t out_stride) {
  if (num_m <= kMaxGemvRows) {
    gemv<Format>(w, first, num_rows, x, num_m, out, out_stride);
  } else {
    packed_matmul<Format>(w, first, num_rows, x, num_m, out, out_stride,
                          multiply_by_vectors<PackedOf<Format>>);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
