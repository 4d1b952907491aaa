// Products with many rows of activations by the AMX tiles: 16 rows of activations by 16 packed rows of
// weights by one run of 32 per instruction. Included inside the anonymous namespace of table_avx512.cpp,
// after kernels_wide_packed.h.
//
// A tile's int32 sums of one run go through memory into registers, where each becomes one fma as everywhere
// else, so the bits are those of every other table. The activations are read where they lie: 16 rows of 32
// codes, one ActivationBlock of each row, whatever the stride; a gathered panel (index) takes the vector way.
//
// Roofline, per 16 x 16 outputs and run (16,384 operations): the tile unit needs 16 cycles (half its depth of
// 64 is used: scales change every 32), the float side 48 operations on two ports, 24 cycles, and the loads
// (16 + 8 rows of tiles, 16 of sums, 16 broadcasts) about as many. So the float side bounds it, at 680
// operations per cycle.
#pragma once

// Tiles 0, 1, 5, 7 are sums; 2 and 6 activations; 3 and 4 weights. 5 to 7 are for the last, shorter group of
// activation rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 32, 64, 64, 64, 32, 64};
  uint8_t rows[16] = {16, 16, 16, 8, 8, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// The compiler does not know that tile loads read memory.
inline void stores_are_done() { asm volatile("" ::: "memory"); }

// The sums of one run into a tile. kTail: the short group; kSecond: the other tile of sums.
template <bool kTail, bool kSecond>
[[gnu::always_inline]] inline void tile_dot(const void* x, int64_t x_stride, const void* codes) {
  if constexpr (kTail && kSecond) {
    _tile_zero(7);
    _tile_loadd(6, x, x_stride);
    _tile_loadd(4, codes, 64);
    _tile_dpbssd(7, 6, 4);
  } else if constexpr (kTail) {
    _tile_zero(5);
    _tile_loadd(6, x, x_stride);
    _tile_loadd(3, codes, 64);
    _tile_dpbssd(5, 6, 3);
  } else if constexpr (kSecond) {
    _tile_zero(1);
    _tile_loadd(2, x, x_stride);
    _tile_loadd(4, codes, 64);
    _tile_dpbssd(1, 2, 4);
  } else {
    _tile_zero(0);
    _tile_loadd(2, x, x_stride);
    _tile_loadd(3, codes, 64);
    _tile_dpbssd(0, 2, 3);
  }
}
template <bool kTail, bool kSecond>
[[gnu::always_inline]] inline void tile_store(int32_t* sums) {
  if constexpr (kTail && kSecond) {
    _tile_stored(7, sums, 64);
  } else if constexpr (kTail) {
    _tile_stored(5, sums, 64);
  } else if constexpr (kSecond) {
    _tile_stored(1, sums, 64);
  } else {
    _tile_stored(0, sums, 64);
  }
}

// Scales of a group of activation rows over a chunk, and scale * sum for minimums.
struct alignas(64) RowScales {
  float d[kPackedRuns][16];
  float sum[kPackedRuns][16];
};

template <bool kMin>
void collect_scales(const Panel& x, int64_t m0, int64_t rows, int64_t first, int64_t runs, RowScales& to) {
  for (int64_t r = 0; r < rows; ++r) {
    const auto* block = reinterpret_cast<const ActivationBlock*>(x.data + (m0 + r) * x.row_bytes) + first;
    for (int64_t b = 0; b < runs; ++b) {
      to.d[b][r] = block[b].scale;
      if constexpr (kMin) to.sum[b][r] = block[b].scale * static_cast<float>(block[b].sum);
    }
  }
}

// kRows rows of activations by sixteen packed rows over `runs` runs, added to out [kRows][16]. Three runs are
// under way: while run b + 1 is in the tiles, the sums of run b go to memory and those of run b - 1 are added
// up. A store waits for its tile, and a load behind it whose address ends in the same twelve bits waits for
// the store: so the loads of the next run come before the stores of this one.
template <class P, int kRows>
void tile_runs(const P& w, int64_t first, int64_t runs, const Panel& x, int64_t m0, const RowScales& scales,
               float (*out)[16]) {
  constexpr bool kTail = kRows < 16;
  alignas(64) int32_t sums[2][P::kDigits][16][16];
  const int64_t stride = x.row_bytes;
  const auto* codes_x = reinterpret_cast<const ActivationBlock*>(x.data + m0 * stride)[first].q;
  V16 acc[kRows];
  unroll<kRows>([&](auto r) { acc[r] = first == 0 ? Simd::zero() : Simd::load(out[r]); });
  const auto dot = [&](auto second, int64_t b) __attribute__((always_inline)) {
    const void* at = codes_x + b * static_cast<int64_t>(sizeof(ActivationBlock));
    if constexpr (P::kDigits == 1) tile_dot<kTail, second != 0>(at, stride, w.codes[b][0]);
  };
  const auto store = [&](auto second, int64_t b) __attribute__((always_inline)) {
    if constexpr (P::kDigits == 1) {
      tile_store<kTail, second != 0>(sums[second][0][0]);
    } else {  // both digits at once: there are no tiles left for the next run
      const void* at = codes_x + b * static_cast<int64_t>(sizeof(ActivationBlock));
      tile_dot<kTail, false>(at, stride, w.codes[b][0]);
      tile_dot<kTail, true>(at, stride, w.codes[b][P::kDigits - 1]);
      tile_store<kTail, false>(sums[second][0][0]);
      tile_store<kTail, true>(sums[second][P::kDigits - 1][0]);
    }
  };
  const auto add = [&](auto second, int64_t b) __attribute__((always_inline)) {
    const V16 d = Simd::load(w.d[b]);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      V isum = _mm512_load_si512(sums[second][0][r]);
      if constexpr (P::kDigits == 2) {
        isum =
            _mm512_add_epi32(_mm512_slli_epi32(isum, 6), _mm512_load_si512(sums[second][P::kDigits - 1][r]));
      }
      acc[r] = Simd::fma(_mm512_cvtepi32_ps(isum), Simd::mul(d, Simd::broadcast(scales.d[b][r])), acc[r]);
      if constexpr (P::kMin) {
        acc[r] = Simd::fma(Simd::load(w.m[b]), Simd::broadcast(scales.sum[b][r]), acc[r]);
      }
    });
  };
  constexpr Index<0> kEven;
  constexpr Index<1> kOdd;
  dot(kEven, 0);
  if (runs > 1) dot(kOdd, 1);
  store(kEven, 0);
  int64_t b = 1;
  for (; b + 2 < runs; b += 2) {  // b is odd
    dot(kEven, b + 1);
    store(kOdd, b);
    add(kEven, b - 1);
    dot(kOdd, b + 2);
    store(kEven, b + 1);
    add(kOdd, b);
  }
  if (b + 1 < runs) {
    dot(kEven, b + 1);
    store(kOdd, b);
    add(kEven, b - 1);
    store(kEven, b + 1);
    add(kOdd, b);
    add(kEven, b + 1);
  } else if (b < runs) {
    store(kOdd, b);
    add(kEven, b - 1);
    add(kOdd, b);
  } else {
    add(kEven, b - 1);
  }
  unroll<kRows>([&](auto r) { Simd::store(out[r], acc[r]); });
}

template <class P>
using TileRunsFn = void (*)(const P&, int64_t, int64_t, const Panel&, int64_t, const RowScales&,
                            float (*)[16]);
template <class P>
constexpr TileRunsFn<P> kTileRuns[17] = {
    nullptr,          tile_runs<P, 1>,  tile_runs<P, 2>,  tile_runs<P, 3>,  tile_runs<P, 4>,
    tile_runs<P, 5>,  tile_runs<P, 6>,  tile_runs<P, 7>,  tile_runs<P, 8>,  tile_runs<P, 9>,
    tile_runs<P, 10>, tile_runs<P, 11>, tile_runs<P, 12>, tile_runs<P, 13>, tile_runs<P, 14>,
    tile_runs<P, 15>, tile_runs<P, 16>};

// Fewer rows than this do not pay for packing.
constexpr int64_t kFewTileRows = 4;

template <class P>
void multiply_by_tiles(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                       Ahead& ahead) {
  stores_are_done();
  RowScales scales;
  for (int64_t m = 0; m < num_m; m += 16) {
    const int64_t rows = num_m - m < 16 ? num_m - m : 16;
    collect_scales<P::kMin>(x, m, rows, first, runs, scales);
    ahead.ask();
    for (int64_t g = 0; g < w.count; ++g) {
      kTileRuns<P>[rows](w.groups[g], first, runs, x, m, scales, w.sums[g] + m);
    }
  }
}

template <class Format>
void tile_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                 float* out, int64_t out_stride) {
  if (num_m <= kFewTileRows || x.index != nullptr) {
    quantized_matmul<Format>(w, first, num_rows, x, num_m, out, out_stride);
    return;
  }
  TileConfig config;
  const int64_t tail = num_m % 16;
  if (tail != 0) config.rows[5] = config.rows[6] = config.rows[7] = static_cast<uint8_t>(tail);
  _tile_loadconfig(&config);
  packed_matmul<Format>(w, first, num_rows, x, num_m, out, out_stride, multiply_by_tiles<PackedOf<Format>>);
  _tile_release();
}
