// Weights repacked for the tensor cores: tiles of 8 rows x all columns, contiguous, so that one bulk copy
// brings a tile and every lane of a warp finds its matrix fragment in one aligned word.
//
// Columns go in pairs of blocks of 32 (a missing last block is zeros). Lane (g, t) = (lane / 4, lane % 4) of
// pair p holds, of row g, elements 4t..4t+3 and 16+4t..16+4t+3 of the even and of the odd block: as the A
// operand of m16n8k32 rows 0-7 are the even and rows 8-15 the odd block, as the B operand they are two
// fragments.
//   kQ8:   [pair][lane] 16 bytes: even low, odd low, even high, odd high; then [pair][g][even, odd] f16
//   scales.
//          544 bytes per pair. From Q8_0, and from Q4_0 and Q5_0, whose codes fit a byte.
//   kMx4:  [pair][lane] 8 bytes: a word per block, its nibbles 0-3 the low and 4-7 the high elements, coded
//   as below;
//          then [pair][g][even, odd] e8m0 of half the scale, since a code means twice its value. 272 bytes
//          per pair. From MXFP4 in either layout.
// Rows are padded to 8 per expert with zero scales.
//
// The nibbles of a word w are looked up by byte permutation, whose selectors are three bits of index and a
// fourth that gives zero for a table of positive bytes. A value v is table[w] - table[w + 0x88888888]:
// positive ones have their index in w, whose fourth bit is clear, negative ones in the sum, and the carries
// of that addition are in the code (encode_e2m1). One addition, on a pipe that is idle, serves eight weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/ops/ops.h"

namespace millrace::cuda {

inline constexpr int kTileRows = 8;
inline constexpr int kPairColumns = 64;
// A sum over the columns is cut into this many runs of whole pairs, summed one after the other, whatever
// kernel computes it: that fixes its bits.
inline constexpr int kSegments = 16;

inline constexpr uint32_t kNegativeSelectors = 0x88888888u;

// Eight e2m1 codes, nibble i of `codes` element i, as the lookups want them.
__host__ __device__ inline constexpr uint32_t encode_e2m1(uint32_t codes) {
  uint32_t word = 0, carry = 0;
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = codes >> (4 * i) & 15u, magnitude = code & 7u;
    // A negative zero becomes a positive one. A positive 7 over a carry selects 0 in the sum, whose value is
    // zero.
    const uint32_t nibble = code > 8 ? 8 + magnitude - carry : magnitude;
    carry = nibble + 8 + carry >= 16 ? 1 : 0;
    word |= nibble << (4 * i);
  }
  return word;
}
// Twice the value of nibble i, from the encoded word.
__host__ __device__ inline constexpr int decode_e2m1(uint32_t word, int i) {
  constexpr uint32_t kMagnitudes = 0xc8643210u;
  const auto lookup = [](uint32_t selector) {
    return selector < 8 ? static_cast<int>(kMagnitudes >> (4 * selector) & 15u) : 0;
  };
  return lookup(word >> (4 * i) & 15u) - lookup((word + kNegativeSelectors) >> (4 * i) & 15u);
}
enum class PackedFormat : int32_t { kNone, kQ8, kMx4 };

struct PackedMatrix {
  const uint8_t* tiles = nullptr;  // [experts][tiles_per_expert][tile_bytes]
  int64_t rows = 0, cols = 0;      // of one expert
  int32_t tiles_per_expert = 0;
  int32_t pairs = 0;
  uint32_t tile_bytes = 0;
  PackedFormat format = PackedFormat::kNone;
};

__host__ __device__ inline constexpr int32_t packed_pairs(int64_t cols) {
  return static_cast<int32_t>((cols + kPairColumns - 1) / kPairColumns);
}
__host__ __device__ inline constexpr uint32_t pair_bytes(PackedFormat format) {
  return format == PackedFormat::kMx4 ? 272 : 544;
}
// The pairs of one segment: [s * n, (s + 1) * n) of them.
__host__ __device__ inline constexpr int32_t pairs_per_segment(int32_t pairs) {
  return (pairs + kSegments - 1) / kSegments;
}

// What `type` is repacked to; kNone: it stays in the file's encoding.
PackedFormat packed_format(DType type);
// Shape of the packed form of [experts, rows, cols], without tiles.
PackedMatrix packed_shape(DType type, int64_t rows, int64_t cols);

// `from`: [experts * rows] rows in the file's encoding. Bound by the bytes read and written.
void launch_repack(const DeviceMatrix& from, int64_t experts, const PackedMatrix& to, uint8_t* tiles,
                   cudaStream_t stream);

// out[t, :] = row tokens[t] of the table * scale, to the bit what the file's encoding says.
void launch_embed_packed(const PackedMatrix& table, const int32_t* tokens, int64_t count, float scale,
                         float* out, cudaStream_t stream);

}  // namespace millrace::cuda
