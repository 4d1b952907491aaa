// Products of MXFP4 weights with many rows of activations by bf16 tiles of the AMX unit. Included inside the
// anonymous namespace of table_avx512.cpp, after kernels_amx.h.
//
// Activations are int8 codes times a power of two per 32, weights e2m1 times one: both exact in bf16, and the
// sum over a block exact in float32. A tile that sums over all columns therefore rounds once per block, as
// the int8 kernels do, and nothing is stored or scaled per block: the same bits as kernels_wide_few.h with
// the same (binary) activations, which decode uses, for it reads weights with half of this kernel's work.
//
// Weights are the tile's rows and activations its columns: 32 columns of sixteen rows of weights are opened
// where they lie in a row, a register each, and never transposed; activations come as pairs of columns
// (to_tiles), and outputs [weights][activations] are transposed once, at the end.
//
// Loops, outermost first: 256 rows of activations; 32 rows of weights; chunks of 10 blocks, opened into a
// scratch; pairs of tiles of activations; the blocks of the chunk, four products each (32 x 32 outputs).
// The first pair opens a block while it multiplies the one two before it. Sums stay in their tiles unless
// there is more than one pair.
//
// Roofline, per 16 rows of weights and block, in cycles: opening 24 (48 vector operations on two ports) to 27
// (64 loads); a product of 16 x 16 outputs 16 in the tile unit, with its share of loads 21 from the first
// level, 27 from the second (docs/kernels/x86_matmul.md).
#pragma once

// bf16 of the e2m1 values, their exponents 126 too high, twice over: vpermw looks at five bits of an index.
// The scale is then taken off by a saturating subtraction, which leaves zero alone.
alignas(64) constexpr uint16_t kE2M1Words[32] = {0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0,
                                                 0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0,
                                                 0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0,
                                                 0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0};

// e8m0 of sixteen rows to what is subtracted from both words of a dword: 253 - e in the exponent. 2 to 253 is
// what there is room for. Tells the rows above that: a damaged file's (255 is a NaN by the format).
inline __mmask16 scale_words(const uint8_t* bytes, uint32_t* down) {
  const V e = _mm512_cvtepu8_epi32(Simd::load128(bytes)), most = _mm512_set1_epi32(253);
  const V minus = _mm512_sub_epi32(most, _mm512_min_epu32(_mm512_max_epu32(e, _mm512_set1_epi32(2)), most));
  _mm512_store_si512(down, _mm512_or_si512(_mm512_slli_epi32(minus, 7), _mm512_slli_epi32(minus, 23)));
  return _mm512_cmpgt_epu32_mask(e, most);
}

// The order of the columns of a block in a tile, which is how the nibbles of a GGUF block fall: qword q of
// a register holds one half of the sixteen bytes, shifted by q / 2 nibbles; its words then begin with nibbles
// q / 2, q / 2 + 4, .. of that half. Byte i holds columns i and i + 16.
constexpr int tile_column(int place) {
  const int half = place / 4 % 2, nibble = place / 8 + 4 * (place % 4);
  return 8 * half + nibble / 2 + 16 * (nibble % 2);
}
struct TileOrder {
  uint16_t word[32];  // of a place: columns c and c + 16 are words 2 c and 2 c + 1
  uint64_t split[8];  // vpmultishiftqb: the same columns from a block of MXFP4Split, halves joined
  uint64_t plain[8];  // from a block of MXFP4
};
constexpr TileOrder make_tile_order() {
  TileOrder order{};
  for (int place = 0; place < 32; ++place) {
    const int column = tile_column(place), local = column % 16 % 8 + (column >= 16 ? 8 : 0);
    order.word[place] = static_cast<uint16_t>(2 * (column % 16) + column / 16);
    order.split[place / 4] |= static_cast<uint64_t>(4 * local) << (16 * (place % 4));
    order.plain[place / 4] |= static_cast<uint64_t>(4 * (place / 8) + 16 * (place % 4)) << (16 * (place % 4));
  }
  return order;
}
alignas(64) constexpr TileOrder kTileOrder = make_tile_order();

// How a block of one row becomes a register of word indices.
template <class Format>
struct TileRowOf;
template <>
struct TileRowOf<FormatMXFP4> {
  static constexpr int64_t kCodesAt = 1, kScaleStep = FormatMXFP4::kBlockBytes;
  V shift = _mm512_set_epi64(12, 12, 8, 8, 4, 4, 0, 0), select = load512(kTileOrder.plain);
  // The two ways use different ports.
  template <bool kShift>
  [[gnu::always_inline]] V indices(const uint8_t* codes) const {
    const V both = _mm512_broadcast_i32x4(Simd::load128(codes));
    return kShift ? _mm512_srlv_epi64(both, shift) : _mm512_multishift_epi64_epi8(select, both);
  }
};
template <>
struct TileRowOf<FormatMXFP4Split> {
  static constexpr int64_t kCodesAt = 0, kScaleStep = 1;
  V select = load512(kTileOrder.split);
  template <bool>
  [[gnu::always_inline]] V indices(const uint8_t* codes) const {
    // Columns 0-7 and 16-23 to one half, 8-15 and 24-31 to the other.
    const V halves = _mm512_shuffle_epi32(_mm512_broadcast_i32x4(Simd::load128(codes)), _MM_PERM_DBCA);
    return _mm512_multishift_epi64_epi8(select, halves);
  }
};

// The scales of sixteen rows over kScaleBlocks blocks, transposed in registers (kernels_wide_formats.h).
constexpr int64_t kScaleBlocks = kPackedRuns;
template <class Format>
struct TileScales {
  static constexpr int kStep = TileRowOf<Format>::kScaleStep;
  alignas(64) uint32_t down[kScaleBlocks][16];
  __mmask16 damaged[kScaleBlocks];

  // Of `count` blocks of rows [row, row + rows); the last is repeated.
  [[gnu::noinline]] void take(const MatrixView& w, int64_t row, int64_t rows, int64_t first, int64_t count) {
    const uint8_t* from[16];
    const int64_t apart = Format::kSplit ? w.scale_row_bytes : w.row_bytes;
    for (int64_t r = 0; r < 16; ++r) {
      from[r] = (Format::kSplit ? w.scales : w.data) + (row + (r < rows ? r : rows - 1)) * apart;
    }
    alignas(64) uint8_t bytes[kScaleBlocks][16];  // of blocks 0 2 4 6 1 3 5 7
    if (count == kScaleBlocks) {
      const V low = eight_rows_of_scales<kStep>(from, first * kStep);
      const V high = eight_rows_of_scales<kStep>(from + 8, first * kStep);
      _mm512_store_si512(bytes, _mm512_unpacklo_epi64(low, high));
      _mm512_store_si512(bytes + 4, _mm512_unpackhi_epi64(low, high));
    } else {
      for (int64_t b = 0; b < count; ++b) {
        for (int64_t r = 0; r < 16; ++r) bytes[b / 2 + b % 2 * 4][r] = from[r][(first + b) * kStep];
      }
    }
    for (int64_t b = 0; b < count; ++b) damaged[b] = scale_words(bytes[b / 2 + b % 2 * 4], down[b]);
  }
};

// NaN for rows with a damaged scale.
[[gnu::noinline]] inline void damage(__mmask16 rows, uint16_t (*to)[32]) {
  for (int64_t r = 0; r < 16; ++r) {
    for (int64_t p = 0; p < 32 && (rows >> r & 1) != 0; ++p) to[r][p] = 0x7fc0;
  }
}

// Block `block` of sixteen rows from `row` on, of which `rows` exist (the last is repeated), as a tile.
// halfway() is called after eight of them.
template <class Format>
struct TileWeights {
  using Row = TileRowOf<Format>;
  Row opener;
  TileScales<Format> scales;
  template <bool kFull, class Halfway>
  [[gnu::always_inline]] void open(const MatrixView& w, int64_t row, int64_t rows, int64_t block,
                                   uint16_t (*to)[32], Halfway halfway) const {
    const int64_t apart = w.row_bytes, at = block % kScaleBlocks;
    const uint8_t* const codes = w.data + row * apart + block * Format::kBlockBytes + Row::kCodesAt;
    const EvenRows even{{codes, codes + 4 * apart, codes + 8 * apart, codes + 12 * apart}, apart};
    const V table = load512(kE2M1Words);
    const Row row_of = opener;  // in registers
    const uint32_t* const down = scales.down[at];
    unroll<16>([&](auto r) __attribute__((always_inline)) {
      if constexpr (r == 8) halfway();
      const V indices =
          row_of.template indices<r % 2 == 0>(kFull ? even[r] : codes + (r < rows ? r : rows - 1) * apart);
      const V minus = _mm512_set1_epi32(static_cast<int32_t>(down[r]));
      _mm512_store_si512(to[r], _mm512_subs_epu16(_mm512_permutexvar_epi16(indices, table), minus));
    });
    if (scales.damaged[at] != 0) [[unlikely]]
      damage(scales.damaged[at], to);
  }
};

// 32 rows of weights as tiles, a ring of blocks. A chunk of kOpenBlocks is used by every pair of groups of
// activations, whose sums, 4 KiB, are loaded and stored once for 40 products; kAheadBlocks are opened before
// the first of them is multiplied: a tile is not loaded from stores that have not left the processor. 24 KiB
// of the first-level cache; chunks of 30 blocks would come from the second, as the activations do already.
constexpr int64_t kOpenBlocks = 10, kAheadBlocks = 2;
struct OpenedTiles {
  alignas(64) uint16_t words[kOpenBlocks + kAheadBlocks][2][16][32];  // [block][group][row][place]
  uint16_t (*block(int64_t i))[16][32] { return words[i % (kOpenBlocks + kAheadBlocks)]; }
};

// Opens a block of 32 rows and asks for what comes later.
template <class Format>
class RowOpener {
 public:
  // The 32 rows behind these are asked for even where a call ends before them: a thread goes through a matrix
  // in several calls.
  RowOpener(const MatrixView& w, int64_t row, int64_t rows, bool alone)
      : w_(w),
        row_(row),
        rows_(rows),
        blocks_(w.cols / kQuantBlock),
        alone_(alone),
        ahead_(w, row + rows, 32, blocks_) {}

  // quarter(0) to quarter(3) are called on the way.
  template <class Quarter>
  [[gnu::always_inline]] void open(int64_t block, uint16_t (*to)[16][32], Quarter quarter) {
    ahead_.ask();
    if (alone_) ask_own(block);
    ask_near(block);
    if (block % kScaleBlocks == 0) take_scales(block);
    if (rows_ >= 32) {
      weights_[0].template open<true>(w_, row_, 16, block, to[0], [&] { quarter(Index<0>{}); });
      quarter(Index<1>{});
      weights_[1].template open<true>(w_, row_ + 16, 16, block, to[1], [&] { quarter(Index<2>{}); });
      quarter(Index<3>{});
    } else {
      open_short(block, to);
      unroll<4>(quarter);
    }
  }

 private:
  [[gnu::noinline]] void open_short(int64_t block, uint16_t (*to)[16][32]) {
    weights_[0].template open<false>(w_, row_, rows_ < 16 ? rows_ : 16, block, to[0], [] {});
    if (rows_ > 16) weights_[1].template open<false>(w_, row_ + 16, rows_ - 16, block, to[1], [] {});
  }
  [[gnu::always_inline]] void take_scales(int64_t block) {
    const int64_t count = blocks_ - block < kScaleBlocks ? blocks_ - block : kScaleBlocks;
    weights_[0].scales.take(w_, row_, rows_ < 16 ? rows_ : 16, block, count);
    if (rows_ > 16) weights_[1].scales.take(w_, row_ + 16, rows_ - 16, block, count);
  }
  // From the second-level cache, where the 32 rows before these asked for them, to the first: four rows with
  // every block, kNear blocks ahead.
  [[gnu::always_inline]] void ask_near(int64_t block) const {
    constexpr int64_t kNear = 8, kBytes = kNear * Format::kBlockBytes;
    const uint8_t* from = w_.data + (row_ + block % kNear * 4) * w_.row_bytes + (block / kNear + 1) * kBytes;
    for (int64_t r = 0; r < 4; ++r, from += w_.row_bytes) {
      for (int64_t line = 64; line <= kBytes; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T0);
      }
    }
  }
  // The first rows of a call have nobody before them to ask: with every block the lines of a few rows, so
  // that kAsked blocks take all 32 rows kAsked blocks further.
  [[gnu::always_inline]] void ask_own(int64_t block) {
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
  Ahead ahead_;
  TileWeights<Format> weights_[2];  // of sixteen rows each
};

// Tiles 0 to 3 are sums [weights][activations], of weights 4 and activations 6, 5 and 6, 4 and 7, 5 and 7.
inline void configure_bf16(int64_t num_m) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 || num_m > 16 ? 64 : 4 * num_m);
    config.rows[t] = 16;
  }
  stores_are_done();
  _tile_loadconfig(&config);
}

// A group of 16 rows of activations: tiles of [16 pairs][rows] dwords, `step` bytes each.
struct TileColumn {
  const uint8_t* at;
  int64_t step, apart;  // apart: step / 16
};

// Product kQuarter of the four of a block; two where there is one group of activations.
template <bool kTwo, int kQuarter>
[[gnu::always_inline]] inline void multiply_quarter(const uint16_t (*w)[16][32], TileColumn a, TileColumn b,
                                                    int64_t block) {
  if constexpr (kQuarter == 0) {
    _tile_loadd(6, a.at + block * a.step, a.apart);
    _tile_loadd(4, w[0], 64);
    _tile_dpbf16ps(0, 4, 6);
  } else if constexpr (kQuarter == 1) {
    _tile_loadd(5, w[1], 64);
    _tile_dpbf16ps(1, 5, 6);
  } else if constexpr (kTwo && kQuarter == 2) {
    _tile_loadd(7, b.at + block * b.step, b.apart);
    _tile_dpbf16ps(2, 4, 7);
  } else if constexpr (kTwo) {
    _tile_dpbf16ps(3, 5, 7);
  }
}

// One or two groups of activations by blocks [first, first + count); on the way blocks [open, open_end) are
// opened, one with every block, the products strewn among its rows: behind a whole block's opening the
// processor does not see them, and the tile unit stands still.
template <bool kTwo, class Format>
void multiply_opened(RowOpener<Format>& opener, OpenedTiles& w, int64_t first, int64_t count, int64_t open,
                     int64_t open_end, TileColumn a, TileColumn b) {
  int64_t i = first;
  for (; i < first + count && open < open_end; ++i, ++open) {
    const auto* mine = w.block(i);
    opener.open(
        open, w.block(open), [&](auto quarter) __attribute__((always_inline)) {
          stores_are_done();
          multiply_quarter<kTwo, quarter>(mine, a, b, i);
        });
  }
  stores_are_done();
  for (; i < first + count; ++i) {
    const auto* mine = w.block(i);
    unroll<4>([&](auto quarter)
                  __attribute__((always_inline)) { multiply_quarter<kTwo, quarter>(mine, a, b, i); });
  }
}

using TileSums = float[4][16][16];

inline void load_sums(bool fresh, const TileSums& sums) {
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[1], 64);
    _tile_loadd(2, sums[2], 64);
    _tile_loadd(3, sums[3], 64);
  }
}
inline void store_sums(bool two, TileSums& sums) {
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (!two) return;
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// b[i] lane j = a[j] lane i; a is used up.
[[gnu::always_inline]] inline void transpose_dwords(V16 (&a)[16], V16 (&b)[16]) {
  unroll<8>([&](auto i) {  // b[2 i], b[2 i + 1]: dwords of rows 2 i and 2 i + 1 in turn
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  });
  unroll<4>([&](auto i) {  // a[4 i + c]: columns c, c + 4, c + 8, c + 12 of rows 4 i .. 4 i + 3
    const auto pd = [](V16 v) { return _mm512_castps_pd(v); };
    a[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b[4 * i]), pd(b[4 * i + 2])));
    a[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b[4 * i]), pd(b[4 * i + 2])));
    a[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b[4 * i + 1]), pd(b[4 * i + 3])));
    a[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b[4 * i + 1]), pd(b[4 * i + 3])));
  });
  unroll<4>([&](auto c) {
    const V16 even0 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88),
              odd0 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    const V16 even1 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    const V16 odd1 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    b[c] = _mm512_shuffle_f32x4(even0, even1, 0x88);
    b[8 + c] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
    b[4 + c] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
    b[12 + c] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
  });
}

// [16 weights][16 activations] -> num_m rows of out.
inline void write_tile(const float (*sums)[16], __mmask16 lanes, int64_t num_m, float* out,
                       int64_t out_stride) {
  if (num_m < 4) {
    for (int64_t m = 0; m < num_m; ++m) {
      float row[16];
      for (int64_t r = 0; r < 16; ++r) row[r] = sums[r][m];
      _mm512_mask_storeu_ps(out + m * out_stride, lanes, Simd::load(row));
    }
    return;
  }
  V16 a[16], b[16];
  unroll<16>([&](auto r) { a[r] = Simd::load(sums[r]); });
  transpose_dwords(a, b);
  for (int64_t m = 0; m < 16 && m < num_m; ++m) _mm512_mask_storeu_ps(out + m * out_stride, lanes, b[m]);
}

constexpr int64_t kTilePairs = kPassRows / 32;

// Up to kPassRows rows of activations, tiles at `x` (kernel_table.h), by up to 32 rows of weights.
template <class Format>
void bf16_rows(RowOpener<Format>& opener, int64_t num_rows, int64_t blocks, const uint8_t* x, int64_t num_m,
               float* out, int64_t out_stride, OpenedTiles& opened, TileSums* sums) {
  const int64_t groups = (num_m + 15) / 16, pairs = (groups + 1) / 2;
  const auto column = [&](int64_t group) -> TileColumn {
    const int64_t rows = num_m - 16 * group < 16 ? num_m - 16 * group : 16;
    return {x + group * blocks * 1024, 64 * rows, 4 * rows};
  };
  const bool keep = pairs == 1;  // in their tiles
  int64_t open = 0;              // the next block to be opened
  for (; open < kAheadBlocks && open < blocks; ++open) opener.open(open, opened.block(open), [](auto) {});
  for (int64_t block = 0; block < blocks; block += kOpenBlocks) {
    const int64_t end = block + kOpenBlocks < blocks ? block + kOpenBlocks : blocks;
    for (int64_t p = 0; p < pairs; ++p) {
      const bool two = 2 * p + 1 < groups;
      const TileColumn a = column(2 * p), b = two ? column(2 * p + 1) : a;
      // The first pair opens what is left of the chunk, the last one the beginning of the next.
      int64_t open_end = p == 0 ? end : open;
      if (p == pairs - 1) open_end = end + kAheadBlocks < blocks ? end + kAheadBlocks : blocks;
      if (!keep || block == 0) load_sums(block == 0, sums[p]);
      two ? multiply_opened<true>(opener, opened, block, end - block, open, open_end, a, b)
          : multiply_opened<false>(opener, opened, block, end - block, open, open_end, a, b);
      open = open_end;
      if (!keep || end == blocks) store_sums(two, sums[p]);
    }
  }
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t m = 16 * group, rows = num_m - m < 16 ? num_m - m : 16;
    for (int64_t g = 0; g < 2 && 16 * g < num_rows; ++g) {
      write_tile(sums[group / 2][group % 2 * 2 + g], first_lanes(num_rows - 16 * g), rows,
                 out + m * out_stride + 16 * g, out_stride);
    }
  }
}

template <class Format>
void bf16_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                 float* out, int64_t out_stride) {
  OpenedTiles opened;
  alignas(64) TileSums sums[kTilePairs];
  const int64_t blocks = w.cols / kQuantBlock;
  configure_bf16(num_m);
  for (int64_t m = 0; m < num_m; m += kPassRows) {
    const int64_t count_m = num_m - m < kPassRows ? num_m - m : kPassRows;
    for (int64_t r = 0; r < num_rows; r += 32) {
      const int64_t count = num_rows - r < 32 ? num_rows - r : 32;
      RowOpener<Format> opener(w, first + r, count, r == 0 && m == 0);
      bf16_rows<Format>(opener, count, blocks, x.data + m * x.row_bytes, count_m, out + m * out_stride + r,
                        out_stride, opened, sums);
    }
  }
  _tile_release();
}

// The smallest power of two that makes the largest of 32 values at most 127, and its inverse. 127.5 / 64 and
// more would round to 128. Below 2^-60 it is zero; a NaN or an infinity stays one.
struct BinaryScale {
  float scale, inverse;
};
inline BinaryScale binary_scale(V16 low, V16 high) {
  const float most = Simd::largest(Simd::max(Simd::abs(low), Simd::abs(high)));
  uint32_t bits;
  __builtin_memcpy(&bits, &most, 4);
  bits = (bits + 0x00010000) & 0x7f800000;
  float power;
  __builtin_memcpy(&power, &bits, 4);
  if (most < 0x1p-60f) return {0.0f, 0.0f};
  return {power * 0x1p-6f, 64.0f / power};
}

void quantize_binary(const float* x, int64_t cols, ActivationBlock* out) {
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, x += kQuantBlock) {
    const V16 low = Simd::load(x), high = Simd::load(x + kLanes);
    const BinaryScale s = binary_scale(low, high);
    const V16 inverse = Simd::broadcast(s.inverse);
    out[b].scale = s.scale;
    const int32_t first = Simd::round_to_int8(Simd::mul(low, inverse), out[b].q);
    out[b].sum = first + Simd::round_to_int8(Simd::mul(high, inverse), out[b].q + kLanes);
  }
}

// The same numbers, code * scale, into a column of a tile: 16 pairs, `height` pairs apart. They are exact in
// bf16, so that the upper half of a float is one.
void to_tiles(const float* x, int64_t cols, uint16_t* to, int64_t height) {
  const V order = load512(kTileOrder.word);
  for (int64_t c = 0; c < cols; c += kQuantBlock, to += height * kQuantBlock) {
    const V16 low = Simd::load(x + c), high = Simd::load(x + c + kLanes);
    const BinaryScale s = binary_scale(low, high);
    const auto rounded = [&](V16 v) {
      const V codes = _mm512_cvtps_epi32(Simd::mul(v, Simd::broadcast(s.inverse)));
      return _mm512_castps_si512(Simd::mul(_mm512_cvtepi32_ps(codes), Simd::broadcast(s.scale)));
    };
    const V both = blend_bits(_mm512_srli_epi32(rounded(low), 16), rounded(high), 0xffff0000ffff0000);
    const V pairs = _mm512_permutexvar_epi16(order, both);
    if (height == 1) {
      _mm512_storeu_si512(to, pairs);
      continue;
    }
    alignas(64) uint32_t pair[16];
    _mm512_store_si512(pair, pairs);
    for (int64_t i = 0; i < 16; ++i) __builtin_memcpy(to + i * height * 2, &pair[i], 4);
  }
}

// The scales of sixteen rows of 32 values, as binary_scale gives them, and their inverses. Those of row r lie
// at scale_place(r).
constexpr int scale_place(int r) { return (r / 4 == 1 ? 8 : r / 4 == 2 ? 4 : r / 4 * 4) + r % 4; }
struct alignas(64) GroupScales {
  float scale[16], inverse[16];
};
[[gnu::always_inline]] inline void group_scales(const float* const* rows, int64_t c, GroupScales& out) {
  const V magnitude = _mm512_set1_epi32(0x7fffffff);
  V most[16];  // as integers: the same order, and a NaN is above all numbers
  unroll<16>([&](auto r) {
    most[r] = _mm512_max_epu32(_mm512_and_si512(load512(rows[r] + c), magnitude),
                               _mm512_and_si512(load512(rows[r] + c + kLanes), magnitude));
  });
  unroll<8>([&](auto i) {  // quarters: row i twice, row i + 8 twice
    most[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(most[i], most[i + 8], 0x44),
                               _mm512_shuffle_i32x4(most[i], most[i + 8], 0xee));
  });
  unroll<4>([&](auto i) {  // rows i, i + 8, i + 4, i + 12
    most[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(most[i], most[i + 4], 0x88),
                               _mm512_shuffle_i32x4(most[i], most[i + 4], 0xdd));
  });
  unroll<2>([&](auto i) {  // of each quarter: rows 2 i, 2 i + 1, again
    most[i + 4] = _mm512_max_epu32(_mm512_unpacklo_epi32(most[2 * i], most[2 * i + 1]),
                                   _mm512_unpackhi_epi32(most[2 * i], most[2 * i + 1]));
  });
  const V all =
      _mm512_max_epu32(_mm512_unpacklo_epi64(most[4], most[5]), _mm512_unpackhi_epi64(most[4], most[5]));
  const V power =
      _mm512_and_si512(_mm512_add_epi32(all, _mm512_set1_epi32(0x00010000)), _mm512_set1_epi32(0x7f800000));
  const __mmask16 some = _mm512_cmpge_epu32_mask(all, _mm512_set1_epi32(0x21800000));  // 2^-60
  const V16 p = _mm512_castsi512_ps(power);
  Simd::store(out.scale, _mm512_maskz_mul_ps(some, p, Simd::broadcast(0x1p-6f)));
  Simd::store(out.inverse, _mm512_maskz_div_ps(some, Simd::broadcast(64.0f), p));
}

// What to_tiles makes of sixteen rows [cols], for a group of sixteen: a third of its instructions.
void to_tile_group(const float* const* rows, int64_t cols, uint16_t* to) {
  const V order = load512(kTileOrder.word);
  for (int64_t c = 0; c < cols; c += kQuantBlock, to += kTileHeight * kQuantBlock) {
    GroupScales of;
    group_scales(rows, c, of);
    V16 a[16], b[16];
    unroll<16>([&](auto r) {
      const V16 inverse = Simd::broadcast(of.inverse[scale_place(r)]);
      const V16 scale = Simd::broadcast(of.scale[scale_place(r)]);
      const auto rounded = [&](const float* x) {
        const V codes = _mm512_cvtps_epi32(Simd::mul(Simd::load(x), inverse));
        return _mm512_castps_si512(Simd::mul(_mm512_cvtepi32_ps(codes), scale));
      };
      const V both = blend_bits(_mm512_srli_epi32(rounded(rows[r] + c), 16), rounded(rows[r] + c + kLanes),
                                0xffff0000ffff0000);
      a[r] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
    });
    transpose_dwords(a, b);
    unroll<16>([&](auto pair) { _mm512_storeu_ps(to + 32 * pair, b[pair]); });
  }
}
