// Products with many rows of activations by the AMX tiles: 16 rows of activations by 16 packed rows of
// weights by one run of 32 per instruction. Included inside the anonymous namespace of table_avx512.cpp,
// after kernels_wide_packed.h.
//
// A tile's int32 sums of one run go through memory into registers, where each becomes one fma as everywhere
// else, so the bits are those of every other table.
//
// Roofline, per 16 x 16 outputs and run (16,384 operations), in cycles: the tile unit 16 (half its depth of
// 64 is used: scales change every 32), storing the sums 16, the float side 24 (48 operations on two ports),
// loading activations and weights 8 and 4. They overlap little: 75 one run after the other, 44 in the best
// schedule found alone, about 105 in this kernel with all the packing (docs/kernels/x86_matmul.md).
#pragma once

// Tiles 0 to 3 are sums [16][16] int32; 4 and 5 activations [16][32]; 6 and 7 weights [8][16][4].
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 32, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8, 8};
};
static_assert(sizeof(TileConfig) == 64);

// The compiler does not know that tile loads read memory.
inline void stores_are_done() { asm volatile("" ::: "memory"); }

template <int kTile>
[[gnu::always_inline]] inline void tile_dot(const void* x, const void* codes) {
  if constexpr (kTile == 0) {
    _tile_zero(0);
    _tile_loadd(4, x, 32);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(0, 4, 6);
  } else if constexpr (kTile == 1) {
    _tile_zero(1);
    _tile_loadd(5, x, 32);
    _tile_loadd(7, codes, 64);
    _tile_dpbssd(1, 5, 7);
  } else if constexpr (kTile == 2) {
    _tile_zero(2);
    _tile_loadd(4, x, 32);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(2, 4, 6);
  } else {
    _tile_zero(3);
    _tile_loadd(5, x, 32);
    _tile_loadd(7, codes, 64);
    _tile_dpbssd(3, 5, 7);
  }
}
template <int kTile>
[[gnu::always_inline]] inline void tile_store(int32_t* sums) {
  if constexpr (kTile == 0) _tile_stored(0, sums, 64);
  if constexpr (kTile == 1) _tile_stored(1, sums, 64);
  if constexpr (kTile == 2) _tile_stored(2, sums, 64);
  if constexpr (kTile == 3) _tile_stored(3, sums, 64);
}

// Sixteen rows of activations over a chunk: codes as tiles, scales (and scale * sum for minimums) a row each.
struct alignas(64) PackedActivations {
  int8_t codes[kPackedRuns][16][32];
  float d[kPackedRuns][16];
  float sum[kPackedRuns][16];
};

template <bool kMin>
void pack_activations(const Panel& x, int64_t m0, int64_t rows, int64_t first, int64_t runs,
                      PackedActivations& to) {
  for (int64_t r = 0; r < rows; ++r) {
    const auto* block = reinterpret_cast<const ActivationBlock*>(panel_row(x, m0 + r)) + first;
    for (int64_t b = 0; b < runs; ++b) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.codes[b][r]), Simd::load256(block[b].q));
      to.d[b][r] = block[b].scale;
      if constexpr (kMin) to.sum[b][r] = block[b].scale * static_cast<float>(block[b].sum);
    }
  }
}

// The rows that will be packed next, into the first-level cache.
inline void ask_activations(const Panel& x, int64_t m0, int64_t rows, int64_t first, int64_t runs) {
  for (int64_t r = 0; r < rows; ++r) {
    const auto* block = reinterpret_cast<const ActivationBlock*>(panel_row(x, m0 + r)) + first;
    for (const auto* at = reinterpret_cast<const char*>(block);
         at < reinterpret_cast<const char*>(block + runs); at += 64) {
      _mm_prefetch(at, _MM_HINT_T0);
    }
  }
}

// The sums of run b, stored in `sums`, to one fma (or two) for each output.
template <class P, int kRows>
[[gnu::always_inline]] inline void add_sums(const P& w, const PackedActivations& x, int64_t b,
                                            const int32_t (*sums)[16][16], V16 (&acc)[kRows]) {
  const V16 d = Simd::load(w.d[b]);
  unroll<kRows>([&](auto r) __attribute__((always_inline)) {
    V isum = _mm512_load_si512(sums[0][r]);
    if constexpr (P::kDigits == 2) {
      isum = _mm512_add_epi32(_mm512_slli_epi32(isum, 6), _mm512_load_si512(sums[P::kDigits - 1][r]));
    }
    acc[r] = Simd::fma(_mm512_cvtepi32_ps(isum), Simd::mul(d, Simd::broadcast(x.d[b][r])), acc[r]);
    if constexpr (P::kMin) {
      acc[r] = Simd::fma(Simd::load(w.m[b]), Simd::broadcast(x.sum[b][r]), acc[r]);
    }
  });
}

// One run into tile kStep % 4; of two digits, into two tiles.
template <class P, int kStep>
[[gnu::always_inline]] inline void start_run(const P& w, const PackedActivations& x, int64_t b) {
  tile_dot<P::kDigits * kStep % 4>(x.codes[b], w.codes[b][0]);
  if constexpr (P::kDigits == 2) tile_dot<(2 * kStep + 1) % 4>(x.codes[b], w.codes[b][P::kDigits - 1]);
}
template <class P, int kStep>
[[gnu::always_inline]] inline void store_run(int32_t (*sums)[16][16]) {
  tile_store<P::kDigits * kStep % 4>(sums[0][0]);
  if constexpr (P::kDigits == 2) tile_store<(2 * kStep + 1) % 4>(sums[P::kDigits - 1][0]);
}

// kRows rows of activations by every packed group over `runs` runs, added to w.sums[g][m ..]. While a run
// enters the tiles, the sums of the run three before it, done by now, go to memory, and those of the one
// before that are added up (of weights with two digits: the run before it, for there are four tiles of sums).
// The pipeline flows on from group to group; kCross is false for chunks whose runs are no multiple of four.
template <class P, int kRows, bool kCross>
void tile_groups(PackedRows<P>& w, const PackedActivations& x, int64_t runs, bool fresh, int64_t m) {
  constexpr int kAhead = 4 / P::kDigits - 1;
  alignas(64) int32_t sums[2][P::kDigits][16][16];
  for (int64_t g = 0; g < w.count; ++g) {
    const P& mine = w.groups[g];
    const P& next = w.groups[g + 1 < w.count ? g + 1 : g];
    const bool cross = kCross && g + 1 < w.count;
    float(*out)[16] = w.sums[g] + m;
    V16 acc[kRows];
    if (fresh) {
      unroll<kRows>([&](auto r) __attribute__((always_inline)) { acc[r] = Simd::zero(); });
    } else {
      unroll<kRows>([&](auto r) __attribute__((always_inline)) { acc[r] = Simd::load(out[r]); });
    }
    if (!kCross || g == 0) {
      start_run<P, 0>(mine, x, 0);
      if (kAhead > 1 && runs > 1) start_run<P, 1>(mine, x, 1);
      if (kAhead > 2 && runs > 2) start_run<P, 2>(mine, x, 2);
    }
    for (int64_t b = 0; b < runs; b += 4) {
      if (b + kAhead < runs) {
        start_run<P, kAhead>(mine, x, b + kAhead);
      } else if (cross) {
        start_run<P, kAhead>(next, x, b + kAhead - runs);
      }
      store_run<P, 0>(sums[0]);
      if (b > 0) add_sums(mine, x, b - 1, sums[1], acc);
      if (b + 1 >= runs) break;
      if (b + kAhead + 1 < runs) {
        start_run<P, kAhead + 1>(mine, x, b + kAhead + 1);
      } else if (cross) {
        start_run<P, kAhead + 1>(next, x, b + kAhead + 1 - runs);
      }
      store_run<P, 1>(sums[1]);
      add_sums(mine, x, b, sums[0], acc);
      if (b + 2 >= runs) break;
      if (b + kAhead + 2 < runs) {
        start_run<P, kAhead + 2>(mine, x, b + kAhead + 2);
      } else if (cross) {
        start_run<P, kAhead + 2>(next, x, b + kAhead + 2 - runs);
      }
      store_run<P, 2>(sums[0]);
      add_sums(mine, x, b + 1, sums[1], acc);
      if (b + 3 >= runs) break;
      if (b + kAhead + 3 < runs) {
        start_run<P, kAhead + 3>(mine, x, b + kAhead + 3);
      } else if (cross) {
        start_run<P, kAhead + 3>(next, x, b + kAhead + 3 - runs);
      }
      store_run<P, 3>(sums[1]);
      add_sums(mine, x, b + 2, sums[0], acc);
    }
    add_sums(mine, x, runs - 1, sums[(runs - 1) % 2], acc);
    unroll<kRows>([&](auto r) __attribute__((always_inline)) { Simd::store(out[r], acc[r]); });
  }
}

template <class P, int kRows>
void tile_chunk(PackedRows<P>& w, const PackedActivations& x, int64_t runs, bool fresh, int64_t m) {
  if (runs % 4 == 0) {
    tile_groups<P, kRows, true>(w, x, runs, fresh, m);
  } else {
    tile_groups<P, kRows, false>(w, x, runs, fresh, m);
  }
}

template <class P>
void multiply_by_tiles(PackedRows<P>& w, int64_t first, int64_t runs, const Panel& x, int64_t num_m,
                       Ahead& ahead) {
  PackedActivations packed;
  for (int64_t m = 0; m < num_m; m += 16) {
    const int64_t rows = num_m - m < 16 ? num_m - m : 16;
    pack_activations<P::kMin>(x, m, rows, first, runs, packed);
    stores_are_done();
    ahead.ask();
    if (m + 16 < num_m) ask_activations(x, m + 16, num_m - m < 32 ? num_m - m - 16 : 16, first, runs);
    // A short group is rounded up: what the rows past its end give is nobody's.
    if (rows > 8) {
      tile_chunk<P, 16>(w, packed, runs, first == 0, m);
    } else {
      tile_chunk<P, 8>(w, packed, runs, first == 0, m);
    }
  }
}

// So many rows or fewer do not pay for packing.
constexpr int64_t kFewTileRows = 8;

template <class Format>
void tile_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                 float* out, int64_t out_stride) {
  if (num_m <= kFewTileRows) {
    few_rows_matmul<Format>(w, first, num_rows, x, num_m, out, out_stride);
    return;
  }
  const TileConfig config;
  _tile_loadconfig(&config);
  packed_matmul<Format>(w, first, num_rows, x, num_m, out, out_stride, multiply_by_tiles<PackedOf<Format>>);
  _tile_release();
}
