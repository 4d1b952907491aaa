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
//   kMx4:  [pair] of [lane] 8 bytes, a word per block, then [g][even, odd] the block's scale: 272 bytes per
//   pair.
//          Lane (g, t)'s eight elements of a block are 8t..8t+7: as an operand of m16n8k16 those of step s
//          are 8t+4s..8t+4s+3, which makes a row of activations readable as it is. From MXFP4 in either
//          layout.
// Rows are padded to 8 per expert with zero scales.
//
// An e2m1 code is a bf16 in disguise: with its exponent in the lowest two bits of a bf16's it is 2^-126 times
// what it means, zero and one half included. A word holds its four pairs of elements (2i in the low half) so
// that three of them need a rotation and a mask, and the fourth one multiplication (mx4.cuh). The scale is
// stored as the exponent of what those have to be multiplied by to be weights times 2^-32, a bf16 without
// rounding for every scale up to 2^33.
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

// Sums of products with MXFP4 weights come out 2^-32 times what they are; this makes them right.
inline constexpr float kMx4Unscale = 0x1p32f;
// The stored exponent of a scale of 2^(e8m0 - 127). What no bf16 holds becomes infinite, and shows.
__host__ __device__ inline constexpr uint8_t encode_mx4_scale(uint8_t e8m0) {
  constexpr int kOffset = 126 - 32;
  return static_cast<uint8_t>(e8m0 + kOffset < 255 ? e8m0 + kOffset : 255);
}
// 255 for one that had become infinite.
__host__ __device__ inline constexpr uint8_t decode_mx4_scale(uint8_t stored) {
  return static_cast<uint8_t>(stored == 255 ? 255 : stored < 94 ? 0 : stored - 94);
}

// Where bit b (0: mantissa, 1, 2: exponent, 3: sign) of element i lies: rotations of 0, 3 and 6 bring those
// of pairs 0 to 2 where a bf16 has them (the signs of pairs 1 and 2 from the other half of the word). Pair 3
// has the bits that are left, and lies so that one multiplication brings them there.
__host__ __device__ inline constexpr int mx4_bit(int i, int b) {
  constexpr uint32_t kPlaces[4] = {0xf876u, 0x2ba9u, 0x5edcu, 0x1043u};
  const bool crosses = b == 3 && (i / 2 == 1 || i / 2 == 2);
  return static_cast<int>(kPlaces[i / 2] >> (4 * b) & 15u) + 16 * ((i + (crosses ? 1 : 0)) % 2);
}
// Pair 0 to 3 of a word, each element's bits where a bf16 has its sign, the lowest two of its exponent and
// the first of its mantissa. No two bits of the multiplication meet where the mask looks, and none carries
// there.
__host__ __device__ inline constexpr uint32_t mx4_pair(uint32_t word, int pair) {
  constexpr uint32_t kBits = 0x81c081c0u, kLeft = 0x001b001bu, kGather = 1u << 3 | 1u << 8 | 1u << 14;
  if (pair == 0) return word & kBits;
  if (pair < 3) return (word >> (3 * pair) | word << (32 - 3 * pair)) & kBits;
  return (word & kLeft) * kGather & kBits;
}
// Eight e2m1 codes, nibble i of `codes` element i.
__host__ __device__ inline constexpr uint32_t encode_mx4(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    for (int b = 0; b < 4; ++b) word |= (codes >> (4 * i + b) & 1u) << mx4_bit(i, b);
  }
  return word;
}
// The e2m1 code of element i.
__host__ __device__ inline constexpr uint32_t decode_mx4(uint32_t word, int i) {
  uint32_t code = 0;
  for (int b = 0; b < 4; ++b) code |= (word >> mx4_bit(i, b) & 1u) << b;
  return code;
}
// Where element i of a pair of blocks lies among the 64 columns of activations in memory, so that the tensor
// core meets it together with its weight: a lane's fragment of 16 columns has two neighbours in the first
// half of them and two in the second.
__host__ __device__ inline constexpr uint32_t mx4_position(uint32_t i) {
  const uint32_t step = i / 32 * 2 + i / 4 % 2, lane = i % 32 / 8, half = i % 4 / 2;
  return step * 16 + half * 8 + lane * 2 + i % 2;
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
inline constexpr int kMx4ScalesAt = 256, kMx4PairBytes = 272;
__host__ __device__ inline constexpr uint32_t pair_bytes(PackedFormat format) {
  return format == PackedFormat::kMx4 ? kMx4PairBytes : 544;
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
