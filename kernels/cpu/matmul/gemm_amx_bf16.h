// Products of MXFP4 weights with many rows of activations by bf16 tiles of the AMX unit.
//
// Activations are int8 codes times a power of two per 32, weights e2m1 times one: both exact in bf16, and the
// sum over a block exact in float32. A tile that sums over all columns therefore rounds once per block, as
// the int8 kernels do, and nothing is stored or scaled per block: the same bits as gemv_x86.h with the
// same (power-of-two-scale) activations, which decode uses, for it reads weights with half of this kernel's
// work.
//
// Activations are a tile's rows and weights its columns, so that a group of fewer than sixteen rows takes the
// tile unit less. 32 columns of sixteen rows of weights are transposed as dwords, eight codes of a row each,
// and dequantized into sixteen registers, two columns of a row a dword; activations lie as rows
// (quantize_pow2.h) and outputs [activations][weights] as they are wanted.
//
// Loops, outermost first: sixteen groups of activations; 32 rows of weights; chunks of blocks, dequantized
// into a scratch; groups of activations; the blocks of the chunk, two products each (16 x 32 outputs). The
// first group dequantizes a block while it multiplies the one before it. Sums stay in their tiles unless
// there is more than one group.
//
// Four of the eight tiles hold something, which takes three loads for two products where two by two would
// take two: a processor whose other thread is busy seems to have few registers to rename tiles, and with
// eight in use its loads and products take turns (docs/kernels/x86_matmul.md).
//
// Roofline, per 16 rows of weights and block, in cycles: dequantizing 32 (64 vector operations on two ports);
// a product of 16 x 16 outputs 16 in the tile unit, its loads beside it. Measured: a product 7.8 ns with
// weights from the first level and activations from the second, 15.9 where the other thread is busy.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/bf16_tile_order.h"
#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/matmul/gemm_x86.h"
#include "kernels/cpu/matmul/gemv_x86.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// bf16 of the e2m1 values, their exponents 126 too high, twice over: vpermw looks at five bits of an index.
// The scale is then taken off by a saturating subtraction, which leaves zero alone.
alignas(64) constexpr uint16_t kE2M1Words[32] = {0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0,
                                                 0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0,
                                                 0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0,
                                                 0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0};

// Where the sixteen bytes of one of four blocks go: to the upper byte of both words of a dword each.
struct ScalePlaces {
  uint8_t at[4][64];
};
constexpr ScalePlaces make_scale_places() {
  ScalePlaces places{};
  for (int block = 0; block < 4; ++block) {
    for (int byte = 0; byte < 64; ++byte)
      places.at[block][byte] = static_cast<uint8_t>(16 * block + byte / 4);
  }
  return places;
}
alignas(64) constexpr ScalePlaces kScalePlaces = make_scale_places();

// e8m0 of sixteen rows of four blocks, [block][row], to what is subtracted from both words of a dword of a
// block, 253 - e in the exponent: block b to down[b]. 2 to 253 is what there is room for. Tells the rows
// above that, [block][row]: a damaged file's (255 is a NaN by the format).
[[gnu::always_inline]] inline __mmask64 scale_words(V e, uint32_t (*down)[16]) {
  const V limit = bytes_of(253);
  const V minus = _mm512_sub_epi8(limit, _mm512_min_epu8(_mm512_max_epu8(e, bytes_of(2)), limit));
  unroll<4>([&](auto b) __attribute__((always_inline)) {
    const V upper = _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, load_bytes(kScalePlaces.at[b]), minus);
    _mm512_store_si512(down[b], _mm512_srli_epi16(upper, 1));
  });
  return _mm512_cmpgt_epu8_mask(e, limit);
}

// Pair kPair of a block, of sixteen rows transposed to t (dword j of a row in t[j]), as words that begin with
// its codes.
template <class Format>
struct TilePairOf;
template <>
struct TilePairOf<FormatMXFP4> {
  static constexpr int64_t kCodesAt = 1, kScaleStep = FormatMXFP4::kBlockBytes;
  template <int kPair>
  [[gnu::always_inline]] static V indices(const V (&t)[4]) {
    return kPair % 4 == 0 ? t[kPair / 4] : _mm512_srli_epi16(t[kPair / 4], kPair % 4 * 4);
  }
};
// Columns in order, a nibble each: the two of a pair lie two nibbles apart in one dword.
template <>
struct TilePairOf<FormatMXFP4Split> {
  static constexpr int64_t kCodesAt = 0, kScaleStep = 1;
  template <int kPair>
  [[gnu::always_inline]] static V indices(const V (&t)[4]) {
    constexpr int kColumn = tile_column(2 * kPair);
    constexpr int64_t kFirst = 4 * (kColumn % 8), kSecond = kFirst + 8;  // bits
    constexpr int64_t kDword = kFirst | kSecond << 16;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(kDword | (kDword + 0x200020) << 32),
                                        t[kColumn / 8]);
  }
};

// The scales of sixteen rows over kScaleBlocks blocks, transposed in registers (formats_x86.h).
constexpr int64_t kScaleBlocks = kPackedRuns;
template <class Format>
struct TileScales {
  static constexpr int kStep = TilePairOf<Format>::kScaleStep;
  alignas(64) uint32_t down[kScaleBlocks][16];
  __mmask16 damaged[kScaleBlocks];
  bool any_damaged;

  // Of `count` blocks of rows [row, row + rows); the last is repeated.
  [[gnu::noinline]] void take(const MatrixView& w, int64_t row, int64_t rows, int64_t first, int64_t count) {
    const uint8_t* from[16];
    const int64_t apart = Format::kSplit ? w.scale_row_bytes : w.row_bytes;
    for (int64_t r = 0; r < 16; ++r) {
      from[r] = (Format::kSplit ? w.scales : w.data) + (row + (r < rows ? r : rows - 1)) * apart;
    }
    V lower, upper;  // [block % 4][row] of blocks 0 to 3 and 4 to 7
    if (count == kScaleBlocks) {
      const V low = eight_rows_of_scales<kStep>(from, first * kStep);
      const V high = eight_rows_of_scales<kStep>(from + 8, first * kStep);
      lower = _mm512_unpacklo_epi64(low, high);
      upper = _mm512_unpackhi_epi64(low, high);
    } else {
      alignas(64) uint8_t bytes[2][kScaleBlocks / 2][16] = {};
      for (int64_t b = 0; b < count; ++b) {
        for (int64_t r = 0; r < 16; ++r) bytes[b / 4][b % 4][r] = from[r][(first + b) * kStep];
      }
      lower = load_bytes(bytes[0]);
      upper = load_bytes(bytes[1]);
    }
    const __mmask64 of_lower = scale_words(lower, down), of_upper = scale_words(upper, down + 4);
    any_damaged = (of_lower | of_upper) != 0;
    for (int64_t b = 0; b < kScaleBlocks; ++b) {
      damaged[b] = static_cast<__mmask16>((b < 4 ? of_lower : of_upper) >> (16 * (b % 4)));
    }
  }
};

// NaN for rows with a damaged scale.
[[gnu::noinline]] inline void damage(__mmask16 rows, uint16_t (*to)[32]) {
  for (int64_t r = 0; r < 16; ++r) {
    for (int64_t p = 0; p < 16 && (rows >> r & 1) != 0; ++p) to[p][2 * r] = to[p][2 * r + 1] = 0x7fc0;
  }
}

// Block `block` of sixteen rows from `row` on, of which `rows` exist (the last is repeated), as a tile
// [pair of columns][row][2]. halfway() is called after eight pairs.
template <class Format>
struct TileWeights {
  using Pair = TilePairOf<Format>;
  TileScales<Format> scales;
  template <bool kFull, class Halfway>
  [[gnu::always_inline]] void dequantize(const MatrixView& w, int64_t row, int64_t rows, int64_t block,
                                         uint16_t (*to)[32], Halfway halfway) const {
    const int64_t apart = w.row_bytes, at = block % kScaleBlocks;
    const uint8_t* const codes = w.data + row * apart + block * Format::kBlockBytes + Pair::kCodesAt;
    V t[4];
    if constexpr (kFull) {
      transpose(even_rows(codes, apart), 0, t);
    } else {
      const uint8_t* from[16];
      for (int64_t r = 0; r < 16; ++r) from[r] = codes + (r < rows ? r : rows - 1) * apart;
      transpose(from, 0, t);
    }
    const V table = load_bytes(kE2M1Words), minus = load_bytes(scales.down[at]);
    unroll<16>([&](auto p) __attribute__((always_inline)) {
      if constexpr (p == 8) halfway();
      const V words = _mm512_permutexvar_epi16(Pair::template indices<p>(t), table);
      _mm512_store_si512(to[p], _mm512_subs_epu16(words, minus));
    });
    if (scales.any_damaged) [[unlikely]]
      damage(scales.damaged[at], to);
  }
};

// 32 rows of weights as tiles, a ring of blocks. A chunk of kChunkBlocks is used by every group of
// activations, whose sums, 2 KiB, are loaded and stored once for 18 products; kAheadBlocks is dequantized
// before the first of them is multiplied: a tile is not loaded from stores that have not left the processor.
// One and not two of them, 4 KiB: a load waits for a store whose address has the same lower twelve bits. 20
// KiB in all, for a busy other thread takes half of the first-level cache.
constexpr int64_t kChunkBlocks = 9, kAheadBlocks = 1;
struct DequantizedTiles {
  alignas(64) uint16_t words[kChunkBlocks + kAheadBlocks][2][16][32];  // [block][group][pair][row, 2]
  uint16_t (*block(int64_t i))[16][32] { return words[i % (kChunkBlocks + kAheadBlocks)]; }
};

// Dequantizes a block of 32 rows and prefetches what comes later.
template <class Format>
class RowDequantizer {
 public:
  // The 32 rows behind these are prefetched even where a call ends before them: a thread goes through a
  // matrix in several calls.
  RowDequantizer(const MatrixView& w, int64_t row, int64_t rows, bool alone)
      : w_(w),
        row_(row),
        rows_(rows),
        blocks_(w.cols / kQuantBlock),
        alone_(alone),
        ahead_(w, row + rows, 32, blocks_) {}

  // half(0) and half(1) are called on the way.
  template <class Half>
  [[gnu::always_inline]] void dequantize(int64_t block, uint16_t (*to)[16][32], Half half) {
    ahead_.prefetch();
    if (alone_) prefetch_own(block);
    prefetch_near(block);
    if (block % kScaleBlocks == 0) take_scales(block);
    if (rows_ >= 32) {
      weights_[0].template dequantize<true>(w_, row_, 16, block, to[0], [&] { half(Index<0>{}); });
      weights_[1].template dequantize<true>(w_, row_ + 16, 16, block, to[1], [&] { half(Index<1>{}); });
    } else {
      dequantize_short(block, to);
      unroll<2>(half);
    }
  }

 private:
  [[gnu::noinline]] void dequantize_short(int64_t block, uint16_t (*to)[16][32]) {
    weights_[0].template dequantize<false>(w_, row_, rows_ < 16 ? rows_ : 16, block, to[0], [] {});
    if (rows_ > 16) weights_[1].template dequantize<false>(w_, row_ + 16, rows_ - 16, block, to[1], [] {});
  }
  [[gnu::always_inline]] void take_scales(int64_t block) {
    const int64_t count = blocks_ - block < kScaleBlocks ? blocks_ - block : kScaleBlocks;
    weights_[0].scales.take(w_, row_, rows_ < 16 ? rows_ : 16, block, count);
    if (rows_ > 16) weights_[1].scales.take(w_, row_ + 16, rows_ - 16, block, count);
  }
  // From the second-level cache, where the 32 rows before these prefetched them, to the first: four rows with
  // every block, kNear blocks ahead.
  [[gnu::always_inline]] void prefetch_near(int64_t block) const {
    constexpr int64_t kNear = 8, kBytes = kNear * Format::kBlockBytes;
    const uint8_t* from = w_.data + (row_ + block % kNear * 4) * w_.row_bytes + (block / kNear + 1) * kBytes;
    for (int64_t r = 0; r < 4; ++r, from += w_.row_bytes) {
      for (int64_t line = 64; line <= kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T0);
      }
    }
  }
  // The first rows of a call were prefetched by nobody: with every block the lines of a few rows, so
  // that kAsked blocks take all 32 rows kAsked blocks further.
  [[gnu::always_inline]] void prefetch_own(int64_t block) {
    constexpr int64_t kAsked = 16, kBytes = kAsked * Format::kBlockBytes;
    const int64_t at = (block / kAsked + 1) * kBytes;
    if (at >= blocks_ * Format::kBlockBytes) return;
    for (int64_t r = block % kAsked * 2; r < block % kAsked * 2 + 2 && r < rows_; ++r) {
      const uint8_t* from = w_.data + (row_ + r) * w_.row_bytes + at;
      for (int64_t line = 0; line < kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T1);
      }
    }
  }

  const MatrixView& w_;
  int64_t row_, rows_, blocks_;
  bool alone_;
  RowPrefetch ahead_;
  TileWeights<Format> weights_[2];  // of sixteen rows each
};

// Tiles 0 and 1 are sums [activations][weights], 4 is a tile of activations, 6 one of weights.
inline void configure_bf16(int64_t height) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = static_cast<uint8_t>(t < 6 ? height : 16);
  }
  compiler_fence();
  _tile_loadconfig(&config);
}

// A group of activations: tiles of [rows][32], `step` bytes each.
struct TileRows {
  const uint8_t* at;
  int64_t step;
};

// Product kHalf of the two of a block.
template <int kHalf>
[[gnu::always_inline]] inline void multiply_half(const uint16_t (*w)[16][32], TileRows a, int64_t block) {
  if constexpr (kHalf == 0) {
    _tile_loadd(4, a.at + block * a.step, 64);
    _tile_loadd(6, w[0], 64);
    _tile_dpbf16ps(0, 4, 6);
  } else {
    _tile_loadd(6, w[1], 64);
    _tile_dpbf16ps(1, 4, 6);
  }
}

// A group of activations by blocks [first, first + count); on the way blocks [ready, ready_end) are
// dequantized, one with every block, the products strewn among its rows: behind a whole block's
// dequantization the processor does not see them, and the tile unit stands still.
template <class Format>
void multiply_dequantized(RowDequantizer<Format>& dequantizer, DequantizedTiles& w, int64_t first,
                          int64_t count, int64_t ready, int64_t ready_end, TileRows a) {
  int64_t i = first;
  for (; i < first + count && ready < ready_end; ++i, ++ready) {
    const auto* mine = w.block(i);
    dequantizer.dequantize(
        ready, w.block(ready), [&](auto half) __attribute__((always_inline)) {
          compiler_fence();
          multiply_half<half>(mine, a, i);
        });
  }
  compiler_fence();
  for (; i < first + count; ++i) {
    const auto* mine = w.block(i);
    multiply_half<0>(mine, a, i);
    multiply_half<1>(mine, a, i);
  }
}

using TileSums = float[2][16][16];

inline void load_sums(bool fresh, const TileSums& sums) {
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[1], 64);
  }
}
inline void store_sums(TileSums& sums) {
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
}

constexpr int64_t kTileGroups = kPassRows / kTileHeight;

// Up to kTileGroups groups of activations of up to `height` rows, tiles at `x` (kernel_table.h), by up to
// 32 rows of weights.
template <class Format>
void bf16_rows(RowDequantizer<Format>& dequantizer, int64_t num_rows, int64_t blocks, const uint8_t* x,
               int64_t num_m, int64_t height, float* out, int64_t out_stride, DequantizedTiles& dequantized,
               TileSums* sums) {
  const int64_t groups = (num_m + height - 1) / height;
  const auto rows_of = [&](int64_t group) {
    return num_m - height * group < height ? num_m - height * group : height;
  };
  const bool keep = groups == 1;  // in their tiles
  int64_t ready = 0;              // the next block to be dequantized
  for (; ready < kAheadBlocks && ready < blocks; ++ready)
    dequantizer.dequantize(ready, dequantized.block(ready), [](auto) {});
  for (int64_t block = 0; block < blocks; block += kChunkBlocks) {
    const int64_t end = block + kChunkBlocks < blocks ? block + kChunkBlocks : blocks;
    for (int64_t group = 0; group < groups; ++group) {
      const TileRows a{x + group * height * blocks * 64, 64 * rows_of(group)};
      // The first group dequantizes what is left of the chunk, the last one the beginning of the next.
      int64_t ready_end = group == 0 ? end : ready;
      if (group == groups - 1) ready_end = end + kAheadBlocks < blocks ? end + kAheadBlocks : blocks;
      if (!keep || block == 0) load_sums(block == 0, sums[group]);
      multiply_dequantized(dequantizer, dequantized, block, end - block, ready, ready_end, a);
      ready = ready_end;
      if (!keep || end == blocks) store_sums(sums[group]);
    }
  }
  compiler_fence();
  for (int64_t group = 0; group < groups; ++group, out += height * out_stride) {
    for (int64_t g = 0; g < 2 && 16 * g < num_rows; ++g) {
      const __mmask16 lanes = first_lanes(num_rows - 16 * g);
      for (int64_t r = 0; r < rows_of(group); ++r) {
        _mm512_mask_storeu_ps(out + r * out_stride + 16 * g, lanes, Simd::load(sums[group][g][r]));
      }
    }
  }
}

template <class Format>
void amx_bf16_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                     float* out, int64_t out_stride) {
  DequantizedTiles dequantized;
  alignas(64) TileSums sums[kTileGroups];
  const int64_t blocks = w.cols / kQuantBlock, pass = kTileGroups * x.height;
  configure_bf16(x.height);
  for (int64_t m = 0; m < num_m; m += pass) {
    const int64_t count_m = num_m - m < pass ? num_m - m : pass;
    for (int64_t r = 0; r < num_rows; r += 32) {
      const int64_t count = num_rows - r < 32 ? num_rows - r : 32;
      RowDequantizer<Format> dequantizer(w, first + r, count, r == 0 && m == 0);
      bf16_rows<Format>(dequantizer, count, blocks, x.data + m * x.row_bytes, count_m, x.height,
                        out + m * out_stride + r, out_stride, dequantized, sums);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
