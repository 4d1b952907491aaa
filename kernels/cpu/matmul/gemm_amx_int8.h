// Products with many rows of activations by the AMX tiles: 16 rows of activations by 16 packed rows of
// weights by one run of 32 per instruction.
//
// Activations come as int8 tiles (tables/kernel_table.h); or as blocks, their rows in any order, which are
// copied into tiles on the way. A tile's int32 sums of one run go through memory into registers, where each
// becomes one fma as everywhere else, so the bits are those of every other table.
//
// A batch is four tiles of sums, whose products, stores and additions overlap with those of the batch before
// (software pipelining). Batches flow on from one group of rows to the next. There is no second tile of
// activations or weights: the fewer tiles hold something, the sooner others can be loaded beside the
// products, where a processor's other thread is busy (docs/kernels/x86_matmul.md).
//
// Roofline, per 16 x 16 outputs and run (16,384 operations), in cycles: the tile unit 16 (half its depth of
// 64 is used: scales change every 32), storing the sums 16, the float side 24 (48 operations on two ports),
// loading activations and weights 8 and 4. They overlap little: 75 one run after the other, 44 in the best
// schedule found alone (docs/kernels/x86_matmul.md).
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/gemm_x86.h"
#include "kernels/cpu/matmul/gemv_x86.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/matmul/quantize_int8.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <int kTile>
[[gnu::always_inline]] inline void tile_dot(const void* x, const void* codes) {
  if constexpr (kTile == 0) _tile_zero(0);
  if constexpr (kTile == 1) _tile_zero(1);
  if constexpr (kTile == 2) _tile_zero(2);
  if constexpr (kTile == 3) _tile_zero(3);
  _tile_loadd(4, x, 32);
  _tile_loadd(5, codes, 64);
  if constexpr (kTile == 0) _tile_dpbssd(0, 4, 5);
  if constexpr (kTile == 1) _tile_dpbssd(1, 4, 5);
  if constexpr (kTile == 2) _tile_dpbssd(2, 4, 5);
  if constexpr (kTile == 3) _tile_dpbssd(3, 4, 5);
}
template <int kTile>
[[gnu::always_inline]] inline void tile_store(int32_t* sums) {
  if constexpr (kTile == 0) _tile_stored(0, sums, 64);
  if constexpr (kTile == 1) _tile_stored(1, sums, 64);
  if constexpr (kTile == 2) _tile_stored(2, sums, 64);
  if constexpr (kTile == 3) _tile_stored(3, sums, 64);
}

// The sums of run b, stored in `sums`, to one fma (or two) for each output.
template <class P>
[[gnu::always_inline]] inline void add_sums(const P& w, const Int8Tile& x, int64_t b,
                                            const int32_t (*sums)[16][16], V16 (&acc)[16]) {
  const V16 d = Simd::load(w.d[b]);
  unroll<16>([&](auto r) __attribute__((always_inline)) {
    V isum = _mm512_load_si512(sums[0][r]);
    if constexpr (P::kDigits == 2) {
      isum = _mm512_add_epi32(_mm512_slli_epi32(isum, 6), _mm512_load_si512(sums[P::kDigits - 1][r]));
    }
    acc[r] = Simd::fma(_mm512_cvtepi32_ps(isum), Simd::mul(d, Simd::broadcast(x.scale[r])), acc[r]);
    if constexpr (P::kMin) acc[r] = Simd::fma(Simd::load(w.m[b]), Simd::broadcast(x.scaled_sum[r]), acc[r]);
  });
}

// A batch: runs [run, run + count) of sixteen packed rows and of a group of activations, four tiles of sums.
// Weights with two digits fill two tiles with a run. Its steps are those of the tiles: step j begins the
// product of tile j, stores what step j - 2 began, and adds up what the batch before began at its step j: no
// tile is stored before it is done, no sum is loaded before it has left the processor (two steps earlier),
// and the four sums that are under way lie in 4 KiB, so that none looks like another's in its lower twelve
// bits, by which a processor tells whether a load waits for a store.
template <class P>
struct TileBatch {
  static constexpr int kRuns = 4 / P::kDigits;
  using Sums = int32_t[4][16][16];
  const P* w;
  const Int8Tile* x;
  int64_t run, count;
  float (*out)[16];   // sums [16 rows of activations][16] over all runs
  bool begins, ends;  // the first and the last batch of these sums in this chunk

  template <int kStep>
  [[gnu::always_inline]] bool has() const {
    return kStep / P::kDigits < count;
  }
  template <int kStep>
  [[gnu::always_inline]] void begin() const {
    constexpr int kRun = kStep / P::kDigits;
    if (has<kStep>()) tile_dot<kStep>(x[run + kRun].codes, w->codes[run + kRun][kStep % P::kDigits]);
  }
  template <int kStep>
  [[gnu::always_inline]] void store(Sums& sums) const {
    if (has<kStep>()) tile_store<kStep>(sums[kStep][0]);
    compiler_fence();
  }
  template <int kStep>
  [[gnu::always_inline]] void add(const Sums& sums, V16 (&acc)[16]) const {
    constexpr int kRun = kStep / P::kDigits;
    if constexpr (kStep % P::kDigits == P::kDigits - 1) {
      if (has<kStep>()) add_sums(*w, x[run + kRun], run + kRun, sums + kRun * P::kDigits, acc);
    }
  }
};

// Lines of what is multiplied next to the first-level cache.
inline void prefetch_tiles(const Int8Tile* tiles, int64_t from, int64_t to) {
  const auto* at = reinterpret_cast<const char*>(tiles);
  for (int64_t line = from; line < to; ++line) _mm_prefetch(at + 64 * line, _MM_HINT_T0);
}

// `groups` groups of 16 rows of activations, `apart` tiles from one to the next, by every packed group over
// `runs` runs: added to w.sums[g][m ..], or beginning them.
template <class P>
void tile_groups(PackedRows<P>& w, const Int8Tile* x, int64_t apart, int64_t groups, int64_t runs, bool fresh,
                 int64_t m, ChunkPrefetch& ahead) {
  constexpr int64_t kTileLines = sizeof(Int8Tile) / 64;
  using T = TileBatch<P>;
  alignas(4096) typename T::Sums sums;
  V16 acc[16];
  unroll<16>([&](auto r) __attribute__((always_inline)) { acc[r] = Simd::zero(); });
  T last{};  // has no runs
  const auto run_batch = [&](const T& now) __attribute__((always_inline)) {
    if (last.begins) {
      if (fresh) {
        unroll<16>([&](auto r) __attribute__((always_inline)) { acc[r] = Simd::zero(); });
      } else {
        unroll<16>([&](auto r) __attribute__((always_inline)) { acc[r] = Simd::load(last.out[r]); });
      }
    }
    unroll<4>([&](auto step) __attribute__((always_inline)) {
      now.template begin<step>();
      constexpr int kBefore = (step + 2) % 4;
      (step < 2 ? last : now).template store<kBefore>(sums);
      last.template add<step>(sums, acc);
    });
    if (last.ends) {
      unroll<16>([&](auto r) __attribute__((always_inline)) { Simd::store(last.out[r], acc[r]); });
    }
    last = now;
  };
  for (int64_t i = 0; i < groups; ++i, x += apart, m += 16) {
    ahead.prefetch();
    for (int64_t g = 0; g < w.count; ++g) {
      if (i + 1 < groups) {
        const int64_t lines = runs * kTileLines;
        prefetch_tiles(x + apart, lines * g / w.count, lines * (g + 1) / w.count);
      }
      for (int64_t run = 0; run < runs; run += T::kRuns) {
        const int64_t count = runs - run < T::kRuns ? runs - run : T::kRuns;
        run_batch({&w.groups[g], x, run, count, w.sums[g] + m, run == 0, run + count == runs});
      }
    }
  }
  run_batch({});
}

template <class P>
void multiply_tiles(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                    ChunkPrefetch& ahead) {
  const int64_t apart = x.row_bytes * kTileHeight / static_cast<int64_t>(sizeof(Int8Tile));
  tile_groups(w, reinterpret_cast<const Int8Tile*>(x.data) + first, apart, (num_m + 15) / 16, runs,
              first == 0, 0, ahead);
}

// What a row of a tile gets from a block.
[[gnu::always_inline]] inline void fill_tile_row(const ActivationBlock& block, Int8Tile& to, int64_t row) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.codes[row]), Simd::load256(block.q));
  to.scale[row] = block.scale;
  to.scaled_sum[row] = block.scale * static_cast<float>(block.sum);
}

// Sixteen rows are copied at a time. Rows past the last keep what they had: what they give is nobody's, but
// it must be no subnormal, for such numbers are slow.
template <class P>
void multiply_blocks(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                     ChunkPrefetch& ahead) {
  alignas(64) Int8Tile tiles[kPackedRuns];
  for (int64_t b = 0; num_m % 16 != 0 && b < runs; ++b) {
    _mm512_store_ps(tiles[b].scale, Simd::zero());
    _mm512_store_ps(tiles[b].scaled_sum, Simd::zero());
  }
  for (int64_t m = 0; m < num_m; m += 16) {
    const int64_t rows = num_m - m < 16 ? num_m - m : 16;
    for (int64_t r = 0; r < rows; ++r) {
      const auto* block = reinterpret_cast<const ActivationBlock*>(panel_row(x, m + r)) + first;
      for (int64_t b = 0; b < runs; ++b) fill_tile_row(block[b], tiles[b], r);
    }
    compiler_fence();
    tile_groups(w, tiles, 0, 1, runs, first == 0, m, ahead);
  }
}

// kFew: the product of at most kMaxGemvRows rows.
template <class Format, MatmulFn kFew>
void amx_int8_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                     float* out, int64_t out_stride) {
  if (num_m <= kMaxGemvRows) {
    kFew(w, first, num_rows, x, num_m, out, out_stride);
    return;
  }
  const TileConfig config;
  compiler_fence();
  _tile_loadconfig(&config);
  packed_matmul<Format, PackedForTiles<Format>>(w, first, num_rows, x, num_m, out, out_stride,
                                                multiply_blocks<PackedForTiles<Format>>);
  _tile_release();
}

template <class Format>
void amx_int8_tile_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                          float* out, int64_t out_stride) {
  const TileConfig config;
  compiler_fence();
  _tile_loadconfig(&config);
  packed_matmul<Format, PackedForTiles<Format>>(w, first, num_rows, x, num_m, out, out_stride,
                                                multiply_tiles<PackedForTiles<Format>>);
  _tile_release();
}

// Activations [cols] to row `row` of the tiles of a group of `height` rows.
void quantize_int8_tile(const float* x, int64_t cols, Int8Tile* tiles, int64_t row, int64_t height) {
  for (int64_t b = 0; b < cols / kQuantBlock; ++b) {
    ActivationBlock block;
    quantize_int8(x + b * kQuantBlock, kQuantBlock, &block);
    fill_tile_row(block, tiles[b], row);
    for (int64_t r = height; row == height - 1 && r < kTileHeight; ++r)
      tiles[b].scale[r] = tiles[b].scaled_sum[r] = 0;
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
