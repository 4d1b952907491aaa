// Few rows of activations by weights of which kRows rows lie interleaved (interleave_rows.h): as gemv_x86.h,
// but what a register holds lies together. A load brings four columns' codes of kRows rows, a scale is one
// load for all of them, and lines follow one another.
//
// Roofline: the weights' bytes from memory. Of Q4_1, 16 x 32 weights (320 bytes) take 32 vector operations:
// 8 masks, 8 vpdpbusd, 4 for scales, 8 to make sums of them; where rows lie one behind the other, 12 inserts
// and 8 shuffles more, and 64 loads and stores for the scales.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/dot_x86.h"
#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/matmul/gemm_x86.h"
#include "kernels/cpu/matmul/gemv_x86.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/rows_x86.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

// A format with kRows rows interleaved.
template <class Format>
struct Interleaved : Format {
  static constexpr bool kInterleaved = true, kEven = false;
  static constexpr int64_t kGroupBytes = kRows * Format::kBlockBytes;
  using Block = typename Format::template BlockOf<InterleavedRows>;
  static void scales(const uint8_t* const* rows, int64_t first, int64_t runs, float* d, float* m) {
    if constexpr (Format::kRuns == 1) {
      const uint8_t* block = rows[0] + first * kGroupBytes;
      for (int64_t b = 0; b < runs; ++b, block += kGroupBytes) {
        F scale, min = zero_floats();
        Format::block_scales(block, &scale, &min);
        store_floats(d + kRows * b, scale);
        if constexpr (Format::kMin) store_floats(m + kRows * b, min);
      }
    } else {
      Format::scales(InterleavedRows(rows), first, runs, d, m);
    }
  }
};

// Lines ahead of those that are multiplied, as many as those, into the second-level cache: to the end of the
// call's rows, then the first of what the thread multiplies next.
struct LinePrefetch {
  const uint8_t *at, *end, *next, *next_end;
  LinePrefetch(const uint8_t* first, int64_t bytes, int64_t ahead, const PrefetchHint& chain)
      : at(first + (ahead < bytes ? ahead : bytes)),
        end(first + bytes),
        next(chain.next),
        next_end(chain.next + chain.bytes) {}
  template <int64_t kBytes>
  [[gnu::always_inline]] void prefetch() {
    if (at >= end) {
      if (at == next_end) return;
      at = next;
      end = next_end;
      next = next_end;
      if (at >= end) return;
    }
    for (int64_t line = 0; line < kBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T1);
    }
    at += kBytes;
  }
};

#if defined(MILLRACE_ROWS_DOT)
// Nibbles: the high ones are multiplied where they stand, and the sum, sixteen times too large, is shifted.
template <class Format, int kPart, int kM>
[[gnu::always_inline]] inline void nibble_dots(typename Interleaved<Format>::Block& block, int group,
                                               const ActivationBlock* const* x, int64_t run, V* sum) {
  const auto high = [](V t) __attribute__((always_inline)) { return bit_and(t, bytes_of(0xf0)); };
  if constexpr (Format::kRuns == 1) {
    V t[4], of_high[kM];
    transpose(block.rows, block.at + Format::kBlockBytes - 16, t);
    unroll<kM>([&](auto i) {
      sum[i] = offset_sum<Format::kOffset>(x[i][run]);
      of_high[i] = zero();
    });
    unroll<4>([&](auto j) {
      const V low = low_nibbles(t[j]), above = high(t[j]);
      unroll<kM>([&](auto i) {
        sum[i] = lane::dot(sum[i], low, four_codes(x[i][run], j));
        of_high[i] = lane::dot(of_high[i], above, four_codes(x[i][run], 4 + j));
      });
    });
    unroll<kM>([&](auto i) { sum[i] = add32(sum[i], signed_right32(of_high[i], 4)); });
  } else {
    block.template take<kPart>(group);
    RunOf<Format>::template dots<kM>(
        [&](auto j) __attribute__((always_inline)) {
          return kPart == 0 ? low_nibbles(block.t[j]) : high(block.t[j]);
        },
        x, run, sum);
    if constexpr (kPart == 1) unroll<kM>([&](auto i) { sum[i] = signed_right32(sum[i], 4); });
  }
}
#endif

// Sums of a run of kRows rows by kM rows of activations.
template <class Format, int kPart, int kM>
[[gnu::always_inline]] inline void interleaved_dots(typename Interleaved<Format>::Block& block, int group,
                                                    const V* half_scales, const ActivationBlock* const* x,
                                                    int64_t run, V* sum) {
#if defined(MILLRACE_ROWS_DOT)
  if constexpr (Format::kMaxCode == 15) return nibble_dots<Format, kPart, kM>(block, group, x, run, sum);
#endif
  V u[8];
  block.template unpack<kPart, RunOf<Format>::kSigned>(u, group);
  const auto codes = [&](auto j) __attribute__((always_inline)) { return u[j]; };
  if constexpr (Format::kHalves) {
    RunOf<Format>::template dots_of_halves<kM>(
        codes, x, run, Interleaved<Format>::Block::template half_scale<kPart>(half_scales, group, 0),
        Interleaved<Format>::Block::template half_scale<kPart>(half_scales, group, 1), sum);
  } else {
    RunOf<Format>::template dots<kM>(codes, x, run, sum);
  }
}

// acc[i] = fma(sum[i], d * d_x, acc[i]), and fma(min, d_x * (sum of the activations' codes), acc[i]).
template <bool kMin, int kM>
[[gnu::always_inline]] inline void add_scaled(const V* sum, F d, F m, const ActivationBlock* const* x,
                                              int64_t run, F* acc) {
  unroll<kM>([&](auto i) {
    const F scale = all(x[i][run].scale);
    acc[i] = fma(to_floats(sum[i]), multiply(d, scale), acc[i]);
    if constexpr (kMin) acc[i] = fma(m, multiply(scale, to_floats(dwords_of(x[i][run].sum))), acc[i]);
  });
}

// A group of kRows rows by kM rows of activations.
template <class Format, int kM>
[[gnu::always_inline]] inline void multiply_group(const uint8_t* group, int64_t runs,
                                                  const ActivationBlock* const* x, F* acc,
                                                  LinePrefetch& ahead) {
  constexpr int64_t kBytes = Interleaved<Format>::kGroupBytes;
  using Block = typename Interleaved<Format>::Block;
  if constexpr (Format::kRuns == 1) {
    for (int64_t run = 0; run < runs; ++run, group += kBytes) {
      ahead.prefetch<kBytes>();
      Block block{InterleavedRows(group), 0};
      V sum[kM];
      interleaved_dots<Format, 0, kM>(block, 0, nullptr, x, run, sum);
      F d, m = zero_floats();
      Format::block_scales(group, &d, &m);
      add_scaled<Format::kMin, kM>(sum, d, m, x, run, acc);
    }
  } else {
    alignas(64) float d[8 * kRows], m[Format::kMin ? 8 * kRows : kRows];
    for (int64_t first = 0; first < runs; first += 8, group += kBytes) {
      const InterleavedRows rows(group);
      Format::scales(rows, 0, 8, d, m);
      Block block(rows, 0);
      V halves[4];
      if constexpr (Format::kHalves) block.load_half_scales(halves);
      each_run<Format, kM == 1>([&](auto part, int of) __attribute__((always_inline)) {
        const int64_t i = Format::kParts * of + part;
        ahead.prefetch<kBytes / 8>();
        V sum[kM];
        interleaved_dots<Format, part, kM>(block, of, halves, x, first + i, sum);
        F min = zero_floats();
        if constexpr (Format::kMin) min = load_floats(m + kRows * i);
        add_scaled<Format::kMin, kM>(sum, load_floats(d + kRows * i), min, x, first + i, acc);
      });
    }
  }
}

template <class Format, int kM>
void gemv_group(const uint8_t* group, int64_t runs, const Panel& panel, int64_t m0, float* out,
                int64_t out_stride, int64_t begin, int64_t end, LinePrefetch& ahead) {
  const ActivationBlock* x[kM];
  F acc[kM];
  unroll<kM>([&](auto i) {
    x[i] = reinterpret_cast<const ActivationBlock*>(panel_row(panel, m0 + i));
    acc[i] = zero_floats();
  });
  multiply_group<Format, kM>(group, runs, x, acc, ahead);
  unroll<kM>([&](auto i) { store_lanes(out + (m0 + i) * out_stride, acc[i], begin, end); });
}

template <class Format>
void gemv_interleaved(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                      float* out, int64_t out_stride) {
  // Lines ahead where nobody has prefetched the first rows.
  constexpr int64_t kAhead = 4096, kPrefetched = 16;  // kRowsAtOnce
  const int64_t runs = w.cols / kQuantBlock, skip = first % kRows;
  const uint8_t* const begin = w.data + (first - skip) * w.row_bytes;
  LinePrefetch ahead(begin, (num_rows + skip) * w.row_bytes,
                     x.prefetch.done ? kPrefetched * w.row_bytes : kAhead, x.prefetch);
  for (int64_t r = -skip; r < num_rows; r += kRows) {
    const uint8_t* const group = w.data + (first + r) * w.row_bytes;
    const int64_t from = r < 0 ? -r : 0, to = num_rows - r < kRows ? num_rows - r : kRows;
    const auto pass = [&](auto size, int64_t m) {
      gemv_group<Format, size>(group, runs, x, m, out + r, out_stride, from, to, ahead);
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

template <class Format>
void interleaved_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                        float* out, int64_t out_stride) {
  if (num_m <= kMaxGemvRows) {
    gemv_interleaved<Format>(w, first, num_rows, x, num_m, out, out_stride);
  } else {
    packed_matmul<Interleaved<Format>, PackedOf<Format>>(w, first, num_rows, x, num_m, out, out_stride,
                                                         multiply_by_vectors<PackedOf<Format>>);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
