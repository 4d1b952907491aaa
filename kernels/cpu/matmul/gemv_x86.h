// Products of block-quantized weights with a few rows of activations (decode): kRows rows of weights at a
// time, a lane each, unpacked straight into registers.
//
// Roofline: the weights' bytes from memory. A core of sixteen that share 140 GB/s gets some 3.4 bytes per
// cycle, so 16 blocks of MXFP4 (272 bytes) may take 80 cycles; unpacking them and multiplying by one row
// takes some 55 operations on two vector ports (12 inserts, 8 shuffles, 8 lookups, 8 vpdpbusd, 10 for the
// scales), each further row 12. Measured: 16 ns from the cache, 29 from memory, where reading alone takes 24
// (docs/kernels/x86_matmul.md).
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/dot_x86.h"
#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/rows_x86.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

// Weights are read in order, so the next rows are known: their lines are prefetched while these rows are
// multiplied, into the second-level cache, a few at every step: a burst would occupy every line buffer of the
// first level and stop the loads that come after. The rows of a gate and an up matrix may be interleaved; the
// lines between are then those of the product that follows.
struct RowPrefetch {
  const uint8_t *at, *end;
  int64_t per_step;  // bytes
  RowPrefetch(const MatrixView& w, int64_t row, int64_t rows, int64_t steps)
      : at(w.data + row * w.row_bytes),
        end(at + rows * w.row_bytes),
        per_step((rows * w.row_bytes / steps + 64) / 64 * 64) {}
  RowPrefetch(const PrefetchHint& chain, int64_t steps)
      : at(chain.next), end(at + chain.bytes), per_step((chain.bytes / steps + 64) / 64 * 64) {}
  [[gnu::always_inline]] void prefetch() {
    const uint8_t* stop = end - at < per_step ? end : at + per_step;
    for (; at < stop; at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }
  // The same without counting, where rows lie one behind the other and a step takes kBytes of them.
  template <int64_t kBytes>
  [[gnu::always_inline]] void prefetch_bytes() {
    if (per_step > kBytes + 64) {
      prefetch();
      return;
    }
    if (at >= end) return;
    // No lambda: g++ takes one that only prefetches for one that does nothing.
    for (int64_t line = 0; line < kBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T1);
    }
    at += kBytes;
  }
};

// Rows of activations that share one unpacking of the weights; so many or fewer do not pay for packing
// (gemm_x86.h).
constexpr int kMaxGemvRows = kRows / 2;  // with their codes they fill the registers

// Runs whose scales are taken together: one stored block of the K types.
constexpr int64_t kChunkRuns = 8;

// Where kRows rows begin; rows past the last repeat it.
struct RowPointers {
  const uint8_t* codes[kRows];
  const uint8_t* scales[kRows];  // of kSplit formats: rows of scales; else the same as codes
};
template <class Format>
inline void point_at(const MatrixView& w, int64_t row, int64_t count, RowPointers& p) {
  for (int64_t r = 0; r < kRows; ++r) {
    const int64_t at = row + (r < count ? r : count - 1);
    p.codes[r] = w.data + at * w.row_bytes;
    p.scales[r] = Format::kSplit ? w.scales + at * w.scale_row_bytes : p.codes[r];
  }
}
// Of interleaved rows the first is where all of them begin.
template <class Format>
requires Format::kInterleaved inline void point_at(const MatrixView& w, int64_t row, int64_t,
                                                   RowPointers& p) {
  p.codes[0] = p.scales[0] = w.data + row * w.row_bytes;
}

// The first rows of a call were prefetched by nobody: they do it themselves, a little ahead.
template <class Format>
[[gnu::always_inline]] inline void prefetch_own(const RowPointers& rows, int64_t run, int64_t runs) {
  constexpr int64_t kBytes = kChunkRuns * Format::kBlockBytes / Format::kRuns, kChunksAhead = 3;
  const int64_t at = run / Format::kRuns * Format::kBlockBytes + kChunksAhead * kBytes;
  if (at >= runs / Format::kRuns * Format::kBlockBytes) return;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t line = 0; line < kBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(rows.codes[r] + at + line), _MM_HINT_T0);
    }
  }
}

// The lines of the next chunk from the second-level cache to the first, those of a row or two with every run:
// the first loads of a chunk touch them all, and would wait for each other.
template <class Format>
[[gnu::always_inline]] inline void prefetch_next_chunk(const RowPointers& rows, int64_t next, int64_t i) {
  constexpr int64_t kBytes = kChunkRuns * Format::kBlockBytes;
  const int64_t at = next * Format::kBlockBytes;
  for (int64_t line = 64; line <= kBytes; line += 64) {
    for (int64_t r = 0; r < kRows / kChunkRuns; ++r) {
      const uint8_t* row = rows.codes[kRows / kChunkRuns * i + r];
      _mm_prefetch(reinterpret_cast<const char*>(row + at + line), _MM_HINT_T0);
    }
  }
}

// acc[i] = fma(sum[i], d * d_x, acc[i]), and fma(min, d_x * (sum of the activations' codes), acc[i]).
template <bool kMin, int kM>
[[gnu::always_inline]] inline void add_scaled(const V* sum, const float* d, const float* m,
                                              const ActivationBlock* const* x, int64_t run, F* acc) {
  const F scale = load_floats(d);
  unroll<kM>([&](auto i) {
    acc[i] = fma(to_floats(sum[i]), multiply(scale, all(x[i][run].scale)), acc[i]);
    if constexpr (kMin) {
      acc[i] =
          fma(load_floats(m), multiply(all(x[i][run].scale), to_floats(dwords_of(x[i][run].sum))), acc[i]);
    }
  });
}

// One run of the weights by kM rows of activations.
template <class Format, int kPart, int kM, class Block>
[[gnu::always_inline]] inline void multiply_run(Block& block, int group, const V* half_scales, const float* d,
                                                const float* m, const ActivationBlock* const* x, int64_t run,
                                                F* acc) {
  V u[8], sum[kM];
  block.template unpack<kPart, RunOf<Format>::kSigned>(u, group);
  const auto codes = [&](auto j) __attribute__((always_inline)) { return u[j]; };
  if constexpr (Format::kHalves) {
    RunOf<Format>::template dots_of_halves<kM>(
        codes, x, run, Format::Block::template half_scale<kPart>(half_scales, group, 0),
        Format::Block::template half_scale<kPart>(half_scales, group, 1), sum);
  } else {
    RunOf<Format>::template dots<kM>(codes, x, run, sum);
  }
  add_scaled<Format::kMin, kM>(sum, d, m, x, run, acc);
}

// The runs of a chunk by kM rows of activations, for formats with a block per run.
template <class Format, int kM>
[[gnu::always_inline]] inline void multiply_chunk(const RowPointers& rows, bool even, int64_t first,
                                                  int64_t count, const float* d, const float* m,
                                                  const ActivationBlock* const* x, F* acc,
                                                  RowPrefetch& ahead) {
  const auto run = [&](auto block, int64_t i) __attribute__((always_inline)) {
    ahead.prefetch_bytes<kRows * Format::kBlockBytes>();
    prefetch_next_chunk<Format>(rows, first + kChunkRuns, i);
    multiply_run<Format, 0, kM>(block, 0, nullptr, d + kRows * i, m + (Format::kMin ? kRows * i : 0), x,
                                first + i, acc);
  };
  if constexpr (Format::kEven) {
    if (even) {
      const uint8_t* const base = rows.codes[0] + first * Format::kBlockBytes;
      const int64_t apart = rows.codes[1] - rows.codes[0];
      EvenRows even_ones = even_rows(base, apart);
      for (int64_t i = 0; i < count; ++i, even_ones.go(Format::kBlockBytes)) {
        run(typename Format::template BlockOf<EvenRows>{even_ones, 0}, i);
      }
      return;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    run(typename Format::Block{rows.codes, (first + i) * Format::kBlockBytes}, i);
  }
}

// kRows rows of weights by kM rows of activations.
template <class Format, int kM>
void gemv_tile(const RowPointers& rows, int64_t runs, const Panel& panel, int64_t m0, float* out,
               int64_t out_stride, int64_t num_rows, RowPrefetch& ahead, bool alone) {
  const ActivationBlock* x[kM];
  F acc[kM];
  unroll<kM>([&](auto i) {
    x[i] = reinterpret_cast<const ActivationBlock*>(panel_row(panel, m0 + i));
    acc[i] = zero_floats();
  });
  alignas(64) float d[kChunkRuns * kRows], m[Format::kMin ? kChunkRuns * kRows : kRows];
  for (int64_t first = 0; first < runs; first += kChunkRuns) {
    const int64_t count = runs - first < kChunkRuns ? runs - first : kChunkRuns;
    Format::scales(rows.scales, first, count, d, m);
    if (alone) prefetch_own<Format>(rows, first, runs);
    if constexpr (Format::kRuns == 1) {
      multiply_chunk<Format, kM>(rows, num_rows >= kRows, first, count, d, m, x, acc, ahead);
    } else {
      typename Format::Block block{rows.codes, first / 8 * Format::kBlockBytes};
      V halves[4];
      if constexpr (Format::kHalves) block.load_half_scales(halves);
      // Written out for several rows, the registers would not do, and the compiler takes its time.
      each_run<Format, kM == 1>([&](auto part, int group) __attribute__((always_inline)) {
        const int64_t i = Format::kParts * group + part;
        ahead.prefetch();
        multiply_run<Format, part, kM>(block, group, halves, d + kRows * i,
                                       m + (Format::kMin ? kRows * i : 0), x, first + i, acc);
      });
    }
  }
  unroll<kM>([&](auto i) { store_rows(out + (m0 + i) * out_stride, acc[i], num_rows); });
}

template <class Format>
void gemv(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m, float* out,
          int64_t out_stride) {
  const int64_t runs = w.cols / kQuantBlock;
  for (int64_t r = 0; r < num_rows; r += kRows) {
    const int64_t left = num_rows - r, next = left > 2 * kRows ? kRows : left - kRows;
    RowPointers rows;
    point_at<Format>(w, first + r, left, rows);
    // Used up by the first pass.
    RowPrefetch ahead =
        next > 0 ? RowPrefetch(w, first + r + kRows, next, runs) : RowPrefetch(x.prefetch, runs);
    const auto pass = [&](auto size, int64_t m) {
      gemv_tile<Format, size>(rows, runs, x, m, out + r, out_stride, left, ahead,
                              r == 0 && m == 0 && !x.prefetch.done);
    };
    int64_t m = 0;
    for (; m + kMaxGemvRows <= num_m; m += kMaxGemvRows) pass(Index<kMaxGemvRows>{}, m);
    unroll_constants<kMaxGemvRows>([&](auto size) {
      if constexpr (size > 0) {
        if (num_m - m == size) pass(size, m);
      }
    });
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
