// Where a block-scaled product of e2m1 matrices finds its operands on sm_100a (tcgen05.mma, 128 x 256 x 64):
// codes in shared memory, scales in tensor memory, and the words that describe both to the instruction. Host
// and device: the kernel computes addresses and descriptors by these, and a test on the host walks them as
// the PTX ISA says the instructions do.
//
// A stage is 256 columns of K, rows of 128 bytes in the 128-byte swizzle: 8 rows are 1,024 bytes, and 16-byte
// chunk c of row r lies at chunk c ^ (r % 8). A step, 64 columns, is 32 bytes of each row. Scales of a stage
// follow the codes, in tiles of 128 rows x 4 blocks, 512 bytes (fp4_scale_byte): 32 lines of 16 bytes, line r
// the words of rows r, r + 32, r + 64 and r + 96. A line becomes four columns of a lane of tensor memory.
#pragma once

#include <cstdint>

#include "kernels/quant/e2m1_word.h"

namespace millrace::quant {

inline constexpr int kFp4TileRows = 128, kFp4TileColumns = 256;  // outputs of a CTA: rows of a, rows of b
inline constexpr int kFp4RowBytes = 128;                         // of a stage: 256 codes
inline constexpr int kFp4Steps = 4;                              // of a stage
inline constexpr int kFp4StageDepth = 256;                       // columns of K
inline constexpr int kFp4Stages = 4;
inline constexpr int kFp4ScaleTileBytes = 512, kFp4ScaleTileRows = 128, kFp4ScaleTileBlocks = 4;
inline constexpr int kTensorColumns = 512;  // all of an SM's tensor memory: one CTA is there at a time

template <bool kNvfp4>
struct Fp4Stage {
  static constexpr int kBlock = kNvfp4 ? 16 : 32;  // columns that share a scale
  // Tiles of scales along K of a stage; NVFP4 needs one for a step, MXFP4 half of one.
  static constexpr int kScaleTiles = kFp4StageDepth / kBlock / kFp4ScaleTileBlocks;
  static constexpr int kScaleRun = kScaleTiles * kFp4ScaleTileBytes;  // of 128 rows, contiguous
  // Bytes of a stage in shared memory, each operand 1,024-byte aligned where the swizzle needs it.
  static constexpr int kA = 0, kB = kFp4TileRows * kFp4RowBytes;
  static constexpr int kAScales = kB + kFp4TileColumns * kFp4RowBytes;
  static constexpr int kBScales = kAScales + kScaleRun;
  static constexpr int kBytes = kBScales + 2 * kScaleRun;
  // Columns of tensor memory: sums first, then the scales of each stage. A stage has its own, so that a copy
  // never overwrites scales that a product still reads.
  static constexpr int kAScaleColumns = 4 * kScaleTiles, kBScaleColumns = 8 * kScaleTiles;
  static constexpr int kScaleColumns = kAScaleColumns + kBScaleColumns;
  static_assert(kBytes % 1024 == 0 && kFp4TileColumns + kFp4Stages * kScaleColumns <= kTensorColumns);

  MILLRACE_HOST_DEVICE static constexpr uint32_t a_scale_column(int stage, int tile) {
    return static_cast<uint32_t>(kFp4TileColumns + stage * kScaleColumns + 4 * tile);
  }
  // half: rows 0 to 127 of b's, or 128 to 255, which are the next four columns.
  MILLRACE_HOST_DEVICE static constexpr uint32_t b_scale_column(int stage, int tile, int half) {
    return static_cast<uint32_t>(kFp4TileColumns + stage * kScaleColumns + kAScaleColumns + 8 * tile +
                                 4 * half);
  }
  // Of a step: its tile of scales, and which byte of a word its first one is.
  MILLRACE_HOST_DEVICE static constexpr int scale_tile(int step) { return kNvfp4 ? step : step / 2; }
  MILLRACE_HOST_DEVICE static constexpr int scale_id(int step) { return kNvfp4 ? 0 : step % 2 * 2; }
};

// Byte of block `block` of row `row` in scales that lie in tiles, `tiles` of them along K.
MILLRACE_HOST_DEVICE inline constexpr int64_t fp4_scale_byte(int64_t row, int64_t block, int64_t tiles) {
  return (row / kFp4ScaleTileRows * tiles + block / kFp4ScaleTileBlocks) * kFp4ScaleTileBytes +
         row % 32 * 16 + row % kFp4ScaleTileRows / 32 * 4 + block % kFp4ScaleTileBlocks;
}
// Stages of K, the last one filled with zeros; tiles of scales along K and bytes of all of a matrix's.
MILLRACE_HOST_DEVICE inline constexpr int64_t fp4_stages(int64_t k) {
  return (k + kFp4StageDepth - 1) / kFp4StageDepth;
}
MILLRACE_HOST_DEVICE inline constexpr int64_t fp4_scale_tiles(int64_t k, bool nvfp4) {
  return fp4_stages(k) * (nvfp4 ? Fp4Stage<true>::kScaleTiles : Fp4Stage<false>::kScaleTiles);
}
// tile_rows: kFp4TileRows for a, kFp4TileColumns for b, of which every CTA reads whole tiles.
MILLRACE_HOST_DEVICE inline constexpr int64_t fp4_tiled_scale_bytes(int64_t rows, int64_t k, bool nvfp4,
                                                                    int64_t tile_rows) {
  return (rows + tile_rows - 1) / tile_rows * (tile_rows / kFp4ScaleTileRows) * fp4_scale_tiles(k, nvfp4) *
         kFp4ScaleTileBytes;
}

// Matrix descriptors of shared memory. Bits 0 to 13: address / 16; 16 to 29: leading byte offset / 16, which
// neither layout uses; 32 to 45: bytes from 8 rows to the next 8, / 16; 46 to 47: 1 on this GPU; 61 to 63:
// swizzle, 0 none, 2 of 128 bytes.
inline constexpr uint64_t kFp4DescriptorVersion = uint64_t{1} << 46;
MILLRACE_HOST_DEVICE inline constexpr uint64_t fp4_codes_descriptor(uint32_t address) {
  constexpr uint64_t kStride = 8 * kFp4RowBytes / 16, kSwizzle128 = 2;
  return (address & 0x3ffffu) >> 4 | kStride << 32 | kFp4DescriptorVersion | kSwizzle128 << 61;
}
// A tile of scales as 32 rows of 16 bytes without a swizzle.
MILLRACE_HOST_DEVICE inline constexpr uint64_t fp4_scales_descriptor(uint32_t address) {
  constexpr uint64_t kStride = 8 * 16 / 16;
  return (address & 0x3ffffu) >> 4 | kStride << 32 | kFp4DescriptorVersion;
}
// Instruction descriptor of kinds mxf4 and mxf4nvf4. Bits 4 to 5: first scale's byte in b's words; 7 to 9 and
// 10 to 11: types of a and b, 1 for e2m1; 17 to 22: n / 8; 23: scales are e8m0 (else e4m3); 27 to 28: m /
// 128; 29 to 30: first scale's byte in a's words. 0 elsewhere: dense, both K-major, nothing negated, 64 of K.
MILLRACE_HOST_DEVICE inline constexpr uint32_t fp4_instruction_descriptor(bool nvfp4, int scale_id) {
  const auto id = static_cast<uint32_t>(scale_id);
  return id << 4 | 1u << 7 | 1u << 10 | static_cast<uint32_t>(kFp4TileColumns / 8) << 17 |
         (nvfp4 ? 0u : 1u) << 23 | static_cast<uint32_t>(kFp4TileRows / 128) << 27 | id << 29;
}

}  // namespace millrace::quant
