// Attention by AMX where a set of eight rows sees 64 tokens whole, heads of 64 dimensions: decode. The
// arithmetic of tiles_amx.h in an order for keys and values that come from memory.
//
// A core that prefetches lines, then pairs them, then computes, leaves memory idle half of the time. Here
// these are one even mix. 64 tokens of a head are 32 chunks of eight lines, and their arithmetic has 32
// steps: 8 products of scores, 8 rows of scores, 8 rows of weights, 8 products of values. Beside each step
// - a chunk kLeadBytes further on is prefetched into the second-level cache, in the order of addresses;
// - a chunk of the next head is paired into one of two scratches, while this head is computed from the other.
// Heads follow one another tile by tile: the first head of the next tile behind the last of this one.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/attention/kv_tiles.h"
#include "kernels/cpu/attention/tiles_amx.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

constexpr int32_t kDecodeDim = 64;
constexpr int32_t kChunkLines = 8;
constexpr int64_t kChunkBytes = kChunkLines * 64;
constexpr int32_t kRunChunks = kLanes * kDecodeDim * 2 / kChunkBytes;   // a head's keys in a block
constexpr int32_t kHeadChunks = 2 * kRunChunks * kTileTokens / kLanes;  // its keys and values in a tile
constexpr int64_t kLeadBytes = 48 << 10;                                // a tile and a half of two heads
static_assert(kHeadChunks == 4 * kSetRows);

// Keys and values of a head as tile products want them; as in AttendTiles.
struct PairedHead {
  alignas(64) uint16_t keys[kTileTokens * kDecodeDim];
  alignas(64) uint16_t values[kTileTokens * kDecodeDim];
  alignas(64) V magnitudes;  // of the values' magnitudes: all_finite
};

struct DecodeTiles : SetScratch {
  PairedHead head[2];
  int32_t now = 0;      // which of them is computed from
  bool paired = false;  // and whether the next tile's first head is in it
};

// Of this tile and the two behind it, the runs in which the heads' keys and values lie, in the order in which
// they are prefetched: of every block the keys of all heads, then their values.
struct TileRuns {
  const uint8_t* at[3 * 2 * kTileTokens / kLanes + 1];
  int32_t chunks;  // of a run
  TileRuns(const AttentionSplit& s, const Tile& tile) : chunks(s.heads * kRunChunks) {
    const uint8_t* const* const tiles[] = {tile.block, tile.next, tile.far};
    const uint8_t** to = at;
    for (const auto* blocks : tiles) {
      for (int32_t b = 0; b < kTileTokens / kLanes; ++b) {
        *to++ = blocks[b] + s.key_offset;
        *to++ = blocks[b] + s.value_offset;
      }
    }
    *to = at[0];  // never prefetched, but looked at behind the last chunk
  }
};

// LinePrefetch for one chunk after the other.
struct LinePrefetch {
  const uint8_t* const* run;
  const uint8_t* at;
  int32_t left, chunks;  // of the run
  LinePrefetch(const TileRuns& runs, int32_t chunk)
      : run(runs.at + chunk / runs.chunks),
        at(*run + chunk % runs.chunks * kChunkBytes),
        left(runs.chunks - chunk % runs.chunks),
        chunks(runs.chunks) {}
  [[gnu::always_inline]] void next() {
    for (int32_t i = 0; i < kChunkLines; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(at) + 64 * i, _MM_HINT_T1);
    }
    asm volatile("");  // g++ takes a function that only prefetches for one that does nothing
    at += kChunkBytes;
    if (--left == 0) {
      at = *++run;
      left = chunks;
    }
  }
};

// A head's keys and values of a tile from the cache to `to`: 16 chunks of keys, then 16 of values, which are
// four lines of one block and the same four of the next.
struct HeadPairing {
  const uint8_t* const* block;
  int64_t key_offset, value_offset;
  PairedHead* to;

  [[gnu::always_inline]] void pair_chunk(int32_t chunk) const {
    constexpr int32_t kKeyChunks = kHeadChunks / 2;
    if (chunk < kKeyChunks) {
      const V order = load_bytes(kPairOrder.word);
      const uint8_t* from = block[chunk / kRunChunks] + key_offset + chunk % kRunChunks * kChunkBytes;
      uint16_t* const pairs = to->keys + chunk * kChunkBytes / 2;
      unroll<kChunkLines>([&](auto i) __attribute__((always_inline)) {
        _mm512_store_si512(pairs + 32 * i, _mm512_permutexvar_epi16(order, load_bytes(from + 64 * i)));
      });
      return;
    }
    constexpr int32_t kHalfChunks = kKeyChunks / 2, kLines = kChunkLines / 2;
    const int32_t half = (chunk - kKeyChunks) / kHalfChunks, line = chunk % kHalfChunks * kLines;
    const uint8_t* const first = block[2 * half] + value_offset + line * 64;
    const uint8_t* const second = block[2 * half + 1] + value_offset + line * 64;
    uint16_t* const pairs = to->values + half * kHalfTokens * kDecodeDim;
    V magnitudes = chunk == kKeyChunks ? _mm512_setzero_si512() : to->magnitudes;
    unroll<kLines>([&](auto i) __attribute__((always_inline)) {  // two lines a token
      pair_value_line(load_bytes(first + 64 * i), load_bytes(second + 64 * i),
                      pairs + (i % 2 * 2 * kLanes + line / 2 + i / 2) * 32, magnitudes);
    });
    to->magnitudes = magnitudes;
  }
};

// 64 tokens of a head from their pairs. False: some value is no number, and was taken out; weights are then
// left in s.scores.
template <bool kPairs>
[[gnu::noinline]] bool attend_paired(const AttentionSplit& s, const SetRows& rows, const QueryWords* queries,
                                     PairedHead& in, const HeadPairing& next, LinePrefetch& shared_prefetch,
                                     SetScratch& t) {
  LinePrefetch prefetch = shared_prefetch;  // in registers
  const auto beside = [&](int32_t step) __attribute__((always_inline)) {
    prefetch.next();
    if constexpr (kPairs) next.pair_chunk(step);
    compiler_fence();
  };
  compiler_fence();
  const bool finite = all_finite(in.magnitudes);
  if (!finite) [[unlikely]] {
    zero_nonfinite_values(kDecodeDim, in.values);
    compiler_fence();
  }
  zero_sums();
  unroll<2>([&](auto k) __attribute__((always_inline)) {  // 32 dimensions
    _tile_loadd(4, queries[k], 64);
    unroll<4>([&](auto b) __attribute__((always_inline)) {
      bf16_product<b>(in.keys + (b * kDecodeDim + 32 * k) * kLanes);
      beside(4 * k + b);
    });
  });
  store_tile_sums(t.sums);
  const auto beside_softmax = [&](int32_t step) __attribute__((always_inline)) { beside(8 + step); };
  softmax_set<true>(s, rows, !finite, beside_softmax, t);
  compiler_fence();
  zero_sums();
  unroll<2>([&](auto half) __attribute__((always_inline)) {
    _tile_loadd(4, t.weights[half], 64);
    unroll<4>([&](auto i) __attribute__((always_inline)) {  // 16 dimensions
      bf16_product<i>(in.values + (half * 4 + i) * kLanes * 32);
      beside(24 + 4 * half + i);
    });
  });
  add_sums(s, rows, 0, 4, t);
  shared_prefetch = prefetch;
  return finite;
}

// A tile that all rows see. Its first head may be paired already, and that of the tile behind it is, if they
// see all of that.
inline void decode_tile(const AttentionSplit& s, const AttentionSplit* heads, const Tile& tile,
                        const SetRows& rows, const QueryWords* queries, DecodeTiles& t) {
  bool goes_on = true;
  for (int32_t r = 0; r < kSetRows; ++r) goes_on &= s.last[r] - tile.start >= 2 * kTileTokens;
  const TileRuns runs(s, tile);
  const int32_t chunks = s.heads * kHeadChunks, furthest = 2 * chunks;
  const int32_t lead = furthest < kLeadBytes / kChunkBytes ? furthest : kLeadBytes / kChunkBytes;
  if (tile.cold) {  // for_each_tile prefetched this one
    LinePrefetch first(runs, chunks);
    for (int32_t i = chunks; i < lead; ++i) first.next();
  }
  const auto pairing = [&](const uint8_t* const* block, int32_t h, PairedHead& to) -> HeadPairing {
    return {block, heads[h].key_offset, heads[h].value_offset, &to};
  };
  if (!t.paired) {
    const HeadPairing first = pairing(tile.block, 0, t.head[t.now]);
    for (int32_t chunk = 0; chunk < kHeadChunks; ++chunk) first.pair_chunk(chunk);
  }
  LinePrefetch prefetch(runs, lead);
  for (int32_t h = 0; h < s.heads; ++h) {
    const bool last = h + 1 == s.heads;
    PairedHead &in = t.head[t.now], &out = t.head[1 - t.now];
    const HeadPairing next = last ? pairing(tile.next, 0, out) : pairing(tile.block, h + 1, out);
    const QueryWords* const query = queries + h * kDecodeDim / 32;
    const bool finite = last && !goes_on ? attend_paired<false>(heads[h], rows, query, in, next, prefetch, t)
                                         : attend_paired<true>(heads[h], rows, query, in, next, prefetch, t);
    for (int32_t r = 0; r < kSetRows && !finite; ++r) add_nonfinite_values(heads[h], tile, r, 0, kTileTokens);
    t.now = 1 - t.now;
  }
  t.paired = goes_on;
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
