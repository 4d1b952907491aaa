// Weights repacked for the tensor cores: tiles of 8 rows x all columns, contiguous, so that one bulk copy
// loads a tile and every lane of a warp finds its matrix fragments in aligned words. Every packed weight is
// a bf16 value, and activations are rounded to bf16: a sum is made of tensor core products of 16 columns.
//
// Columns go in K steps of 64, pairs of blocks of 32 (a missing last block is zeros). Lane (g, t) = (lane /
// 4, lane % 4).
//   kQ8:   [K step] of [lane] 16 bytes, eight per block: elements 8t..8t+7 of row g, plus 128; then [g][even,
//          odd] the block's scale: 544 bytes per K step. From Q8_0. The weight is code * bf16(scale), rounded
//          to bf16.
//   kMxfp4: [K step] of [lane] 8 bytes, a word per block, then [g][even, odd] the block's scale: 272
//          bytes per K step. The same eight elements. From MXFP4 in either layout, exact.
//   kQ4:   [K step] of [lane] 8 bytes, a word per block: the same eight elements, four bits each; then
//          [g] the two blocks' scales, then their minima, as bf16: 320 bytes per K step. From Q4_K, Q4_0,
//          Q4_1, Q4_Z. The weight is code * bf16(scale) - bf16(minimum), rounded to bf16.
//   kQ5:   as kQ4 with [lane] 2 bytes of fifth bits behind the words: 384 bytes per K step. From Q5_K, Q5_0,
//          Q5_1; the same weight.
//   kQ6:   as kQ4 with [lane] a word of two more bits each behind the words, then [g][16 of each block][even,
//          odd] scales: 448 bytes per K step. From Q6_K. The weight is (code - 32) * bf16(scale), rounded.
//   kBf16: [K step][row][64] as they are, chunks of 16 bytes exchanged by chunk ^ row (the 128-byte
//          swizzle of warpgroup products): 1,024 bytes per K step. From BF16, exact; from F16 and every
//          other type that has no format of its own, rounded.
// As operands of m16n8k16, elements 8t+4s..8t+4s+3 of a block are step s of all but kBf16, elements
// 4t..4t+3 of each 16 columns a step of kBf16: that makes a row of activations readable as it lies.
// Rows are padded to 8 per expert with zeros.
//
// A product of many rows would dequantize codes again for every few of them. Where there is memory for it, a
// matrix of kQ4 to kQ8 that prompts multiply is there a second time, dequantized: the bf16 weights that lanes
// make of the codes, still 2^-32 times what they are, in tiles as kBf16 has them, columns in the order of
// column_position(kQ8). Activations rounded for kQ8 are multiplied with them too.
//
// Eight bits with an exponent of 0 or 1 are the bf16 u * 2^-133, so one fused multiply-add with the scale
// makes (u - 128) * scale of them, rounded once. Codes of fewer bits lie in the lowest of those eight (even
// pairs of elements) or in the highest (odd pairs, whose scale is multiplied by 2^(bits - 8)): so two pairs
// are two masks of one word. An e2m1 code is a bf16 in disguise as well
// (quant/e2m1_word.h), 2^-126 times what it means. Scales are stored as what those have to be multiplied
// by to be weights times 2^-32, a bf16 without rounding for every MXFP4 scale up to 2^33.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/device_matrix.h"
#include "kernels/quant/e2m1_word.h"

namespace millrace::cuda {

inline constexpr int kTileRows = 8;
inline constexpr int kKStepColumns = 64;
// A sum over the columns is cut into this many segments of whole K steps, summed one after the other,
// whatever kernel computes it: that fixes its bits.
inline constexpr int kSplitK = 16;

// Sums of products with kMxfp4 and kQ8 weights come out 2^-32 times what they are; this makes them right.
inline constexpr float kPackedUnscale = 0x1p32f;
// The stored exponent of a scale of 2^(e8m0 - 127). What no bf16 holds becomes infinite, and shows.
__host__ __device__ inline constexpr uint8_t encode_mxfp4_scale(uint8_t e8m0) {
  constexpr int kOffset = 126 - 32;
  return static_cast<uint8_t>(e8m0 + kOffset < 255 ? e8m0 + kOffset : 255);
}
// 255 for one that had become infinite.
__host__ __device__ inline constexpr uint8_t decode_mxfp4_scale(uint8_t stored) {
  return static_cast<uint8_t>(stored == 255 ? 255 : stored < 94 ? 0 : stored - 94);
}

// Pair 0 to 3 of a word of eight e2m1 codes, and the word (quant/e2m1_word.h).
__host__ __device__ inline constexpr uint32_t mxfp4_pair(uint32_t word, int pair) {
  return quant::e2m1_pair(word, pair);
}
__host__ __device__ inline constexpr uint32_t encode_mxfp4(uint32_t codes) {
  return quant::encode_e2m1(codes);
}
__host__ __device__ inline constexpr uint32_t decode_mxfp4(uint32_t word, int i) {
  return quant::decode_e2m1(word, i);
}
// Where element i of a K step lies among the 64 columns of activations in memory, so that the tensor
// core multiplies it with its weight of all but kBf16: a lane's fragment of 16 columns has two neighbours
// in the first half of them and two in the second.
__host__ __device__ inline constexpr uint32_t mxfp4_position(uint32_t i) {
  const uint32_t step = i / 32 * 2 + i / 4 % 2, lane = i % 32 / 8, half = i % 4 / 2;
  return step * 16 + half * 8 + lane * 2 + i % 2;
}

// The stored scale of kQ8: a bf16, rounded to nearest, 2^101 times what it is. What is not finite stays so.
inline constexpr float kQ8ScaleUp = 0x1p101f;
__host__ __device__ inline constexpr uint16_t encode_q8_scale(float scale) {
  const auto bits = std::bit_cast<uint32_t>(scale * kQ8ScaleUp);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
__host__ __device__ inline constexpr float decode_q8_scale(uint16_t stored) {
  return std::bit_cast<float>(static_cast<uint32_t>(stored) << 16) / kQ8ScaleUp;
}

// The stored minimum of kQ4 and kQ5: what is added to code * scale, in the same unit.
__host__ __device__ inline constexpr uint16_t encode_affine_min(float min) {
  const auto bits = std::bit_cast<uint32_t>(-min / kPackedUnscale);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
__host__ __device__ inline constexpr float decode_affine_min(uint16_t stored) {
  return -std::bit_cast<float>(static_cast<uint32_t>(stored) << 16) * kPackedUnscale;
}

// Codes of kQ4, kQ5 and kQ6. Pair p (0 to 3) of a block's word has its four bits at 4p of either half; with
// a fifth and sixth bit an even pair has its lowest four there, an odd one its highest. The rest lies in a
// second word of both blocks, so that one rotation of it serves two pairs.
// Bits of the rest that pair p of block `odd` is rotated right by.
template <int kBits>
__host__ __device__ inline constexpr int affine_rotation(int odd, int p) {
  if constexpr (kBits == 6) return 4 * odd + 8 * (p / 2);
  constexpr int kRight[8] = {0, 0, 2, 2, 30, 30, 28, 4};
  return kRight[4 * odd + p];
}
__host__ __device__ inline constexpr uint32_t rotate_right(uint32_t word, int by) {
  return by == 0 ? word : word >> by | word << (32 - by);
}
// Both codes of a pair, each as the low eight bits of a bf16: as it is, or times 2^(8 - kBits) where p is
// odd.
template <int kBits>
__host__ __device__ inline constexpr uint32_t affine_pair(uint32_t word, uint32_t rest, int odd, int p) {
  const uint32_t nibbles = (p < 2 ? word : word >> 8) & (p % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
  if constexpr (kBits == 4) return nibbles;
  constexpr uint32_t kOne = (1u << (kBits - 4)) - 1;
  const uint32_t mask = p % 2 == 0 ? kOne << 4 : kOne << (8 - kBits);
  return nibbles | (rotate_right(rest, affine_rotation<kBits>(odd, p)) & (mask | mask << 16));
}
// Adds element i (0 to 7) of block `odd` to a lane's words.
template <int kBits>
__host__ __device__ inline constexpr void affine_put(uint32_t code, int odd, int i, uint32_t& word,
                                                     uint32_t& rest) {
  const int p = i / 2, half = 16 * (i % 2);
  const bool even = p % 2 == 0;
  word |= (even ? code & 15u : code >> (kBits - 4)) << (4 * p + half);
  if constexpr (kBits > 4) {
    const uint32_t more = even ? code >> 4 : code & ((1u << (kBits - 4)) - 1);
    const uint32_t place = (even ? 4 : 8 - kBits) + half;
    rest |= rotate_right(more << place, (32 - affine_rotation<kBits>(odd, p)) % 32);
  }
}
// Element i of them.
template <int kBits>
__host__ __device__ inline constexpr uint32_t affine_code(uint32_t word, uint32_t rest, int odd, int i) {
  const uint32_t both = affine_pair<kBits>(word, rest, odd, i / 2) >> (16 * (i % 2)) & 255u;
  return i / 2 % 2 == 0 ? both : both >> (8 - kBits);
}
// The fifth bits lie in the low bytes of the two halves: that much is stored of them.
__host__ __device__ inline constexpr uint16_t narrow_fifth_bits(uint32_t rest) {
  return static_cast<uint16_t>((rest & 255u) | (rest >> 8 & 0xff00u));
}
__host__ __device__ inline constexpr uint32_t widen_fifth_bits(uint32_t stored) {
  return (stored & 255u) | (stored & 0xff00u) << 8;
}

enum class PackedFormat : int32_t { kNone, kQ8, kMxfp4, kBf16, kQ4, kQ5, kQ6 };
inline constexpr int kPackedFormats = 7;
// Codes with scales, which a lane turns into bf16: all that has a dequantized copy.
__host__ __device__ inline constexpr bool has_codes(PackedFormat format) {
  return format == PackedFormat::kQ8 || format >= PackedFormat::kQ4;
}

// The same for any format.
__host__ __device__ inline constexpr uint32_t column_position(PackedFormat format, uint32_t i) {
  return format == PackedFormat::kBf16 ? i : mxfp4_position(i);
}
// Where eight elements, 8 * chunk and on, of a row of a K step of kBf16 lie.
__host__ __device__ inline constexpr uint32_t bf16_chunk(uint32_t row, uint32_t chunk) {
  return row * 128 + (chunk ^ row % 8) * 16;
}

struct PackedMatrix {
  const uint8_t* tiles = nullptr;  // [experts][tiles_per_expert][tile_bytes]
  int64_t rows = 0, cols = 0;      // of one expert
  int32_t tiles_per_expert = 0;
  int32_t k_steps = 0;
  uint32_t tile_bytes = 0;
  PackedFormat format = PackedFormat::kNone;
  // kQ4 to kQ8: the same weights dequantized, [tiles_per_expert][k_steps][kBf16KStepBytes], or null.
  const uint8_t* dequantized = nullptr;
};

__host__ __device__ inline constexpr int32_t packed_k_steps(int64_t cols) {
  return static_cast<int32_t>((cols + kKStepColumns - 1) / kKStepColumns);
}
inline constexpr int kMxfp4ScalesAt = 256, kMxfp4KStepBytes = 272;
inline constexpr int kQ8ScalesAt = 512, kQ8KStepBytes = 544;
inline constexpr int kBf16KStepBytes = 1024;
inline constexpr int kAffineRestAt = 256;  // kQ4 has none
inline constexpr int kQ4ScalesAt = 256, kQ4KStepBytes = 320;
inline constexpr int kQ5ScalesAt = 320, kQ5KStepBytes = 384;
inline constexpr int kQ6ScalesAt = 384, kQ6KStepBytes = 448;
__host__ __device__ inline constexpr uint32_t k_step_bytes(PackedFormat format) {
  switch (format) {
    case PackedFormat::kMxfp4:
      return kMxfp4KStepBytes;
    case PackedFormat::kQ8:
      return kQ8KStepBytes;
    case PackedFormat::kQ4:
      return kQ4KStepBytes;
    case PackedFormat::kQ5:
      return kQ5KStepBytes;
    case PackedFormat::kQ6:
      return kQ6KStepBytes;
    default:
      return kBf16KStepBytes;
  }
}
// The K steps of one segment: [s * n, (s + 1) * n) of them.
__host__ __device__ inline constexpr int32_t k_steps_per_segment(int32_t k_steps) {
  return (k_steps + kSplitK - 1) / kSplitK;
}

// What rows of `cols` elements of `type` are repacked to; kNone: they stay in the file's encoding (F32, and
// rows that are not whole blocks of 32).
PackedFormat packed_format(DType type, int64_t cols);
// Shape of the packed form of [experts, rows, cols], without tiles.
PackedMatrix packed_shape(DType type, int64_t rows, int64_t cols);

// `from`: `to.rows` rows in the file's encoding, which are rows `first_row` and on of the grid of scales
// beside them, where there is one. Bound by the bytes read and written.
void launch_repack(const DeviceMatrix& from, int64_t first_row, const PackedMatrix& to, uint8_t* tiles,
                   const Launch& at);

// Bytes of a matrix of one expert dequantized; 0 for a format that is not.
size_t dequantized_bytes(const PackedMatrix& packed);
// Dequantizes packed.tiles, of one expert. Bound by the bytes read and written: 1.06 + 2 a weight.
void launch_dequantize(const PackedMatrix& packed, uint8_t* to, const Launch& at);

// out[t, :] = row tokens[t] of the table * scale: what the format holds, without a further rounding.
void launch_embed_packed(const PackedMatrix& table, const int32_t* tokens, int64_t count, float scale,
                         float* out, const Launch& at);

}  // namespace millrace::cuda
