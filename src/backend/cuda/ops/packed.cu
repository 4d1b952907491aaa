// Repacking at load: one thread per (tile, pair, lane) gathers its 16 codes. See packed.h for the layout.
#include <cuda_fp16.h>

#include "backend/cuda/device.h"
#include "backend/cuda/ops/decode.cuh"
#include "backend/cuda/ops/packed.h"
#include "backend/cuda/ops/reduce.cuh"
#include "quant/blocks.h"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

// The code of element k of a block, as the integer its scale multiplies.
__device__ inline int block_code(DType type, const uint8_t* block, int k) {
  const int j = k % 16, high = k / 16;
  switch (type) {
    case DType::kQ4_0:
      return ((block[2 + j] >> (4 * high)) & 15) - 8;
    case DType::kQ5_0: {
      const int fifth = (block[2 + k / 8] >> (k % 8)) & 1;
      return (((block[6 + j] >> (4 * high)) & 15) | fifth << 4) - 16;
    }
    default:
      return static_cast<int8_t>(block[2 + k]);
  }
}

// e2m1 nibble of element k: GGUF's blocks and Hugging Face's split planes differ in the order.
__device__ inline uint32_t nibble_code(DType type, const uint8_t* codes, int k) {
  if (type == DType::kMXFP4) return (codes[k % 16] >> (4 * (k / 16))) & 15u;
  return (codes[k / 2] >> (4 * (k % 2))) & 15u;
}

__device__ inline int first_of_lane(int t, int i) { return 4 * t + i % 4 + 16 * (i / 4); }  // i in [0, 8)

struct Source {
  const uint8_t* row;  // null in the padding
  const uint8_t* scales;
  int64_t blocks;
};

__device__ inline Source source_of(const DeviceMatrix& from, const PackedMatrix& to, int64_t tile, int g) {
  const int64_t expert = tile / to.tiles_per_expert, row = tile % to.tiles_per_expert * kTileRows + g;
  if (row >= to.rows) return {nullptr, nullptr, 0};
  const int64_t source_row = expert * to.rows + row;
  return {from.data + source_row * from.row_bytes,
          from.scales != nullptr ? from.scales + source_row * from.scales_per_row : nullptr, to.cols / 32};
}

__device__ inline void repack_q8(const DeviceMatrix& from, const Source& source, int64_t pair, int g, int t,
                                 uint8_t* tile, int32_t pairs) {
  const int64_t block_bytes = from.row_bytes / source.blocks;
  uint32_t words[4] = {};
  uint16_t scales[2] = {};
  for (int odd = 0; odd < 2; ++odd) {
    const int64_t b = 2 * pair + odd;
    if (source.row == nullptr || b >= source.blocks) continue;
    const uint8_t* block = source.row + b * block_bytes;
    scales[odd] = static_cast<uint16_t>(block[0] | block[1] << 8);
    for (int i = 0; i < 8; ++i) {
      const auto code = static_cast<uint8_t>(block_code(from.type, block, first_of_lane(t, i)));
      words[odd + 2 * (i / 4)] |= static_cast<uint32_t>(code) << (8 * (i % 4));
    }
  }
  *reinterpret_cast<uint4*>(tile + pair * 512 + (4 * g + t) * 16) = {words[0], words[1], words[2], words[3]};
  if (t == 0) {
    *reinterpret_cast<uint32_t*>(tile + int64_t{pairs} * 512 + (pair * 8 + g) * 4) =
        scales[0] | static_cast<uint32_t>(scales[1]) << 16;
  }
}

__device__ inline void repack_mx4(const DeviceMatrix& from, const Source& source, int64_t pair, int g, int t,
                                  uint8_t* tile) {
  const bool split = from.type == DType::kMXFP4Split;
  uint32_t words[2] = {};
  uint8_t scales[2] = {};
  for (int odd = 0; odd < 2; ++odd) {
    const int64_t b = 2 * pair + odd;
    if (source.row == nullptr || b >= source.blocks) continue;
    const uint8_t* codes = split ? source.row + b * 16 : source.row + b * 17 + 1;
    scales[odd] = encode_mx4_scale(split ? source.scales[b] : codes[-1]);
    uint32_t plain = 0;
    for (int i = 0; i < 8; ++i) plain |= nibble_code(from.type, codes, 8 * t + i) << (4 * i);
    words[odd] = encode_mx4(plain);
  }
  uint8_t* to = tile + pair * kMx4PairBytes;
  *reinterpret_cast<uint2*>(to + (4 * g + t) * 8) = {words[0], words[1]};
  if (t == 0) {
    *reinterpret_cast<uint16_t*>(to + kMx4ScalesAt + g * 2) =
        static_cast<uint16_t>(scales[0] | scales[1] << 8);
  }
}

__global__ void __launch_bounds__(kThreads)
    repack_kernel(DeviceMatrix from, int64_t tiles, PackedMatrix to, uint8_t* out) {
  const int64_t count = tiles * to.pairs * kWarpLanes;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int lane = static_cast<int>(i % kWarpLanes), g = lane / 4, t = lane % 4;
    const int64_t pair = i / kWarpLanes % to.pairs, tile = i / kWarpLanes / to.pairs;
    uint8_t* to_tile = out + tile * to.tile_bytes;
    const Source source = source_of(from, to, tile, g);
    if (to.format == PackedFormat::kMx4) {
      repack_mx4(from, source, pair, g, t, to_tile);
    } else {
      repack_q8(from, source, pair, g, t, to_tile, to.pairs);
    }
  }
}

// Element c of a row, of the tile that holds it.
__device__ inline float packed_element(const PackedMatrix& m, int64_t row, int c) {
  const uint8_t* tile = m.tiles + row / kTileRows * m.tile_bytes;
  const int g = static_cast<int>(row % kTileRows), pair = c / kPairColumns, odd = c / 32 % 2, k = c % 32;
  if (m.format == PackedFormat::kQ8) {
    const int lane = 4 * g + k % 16 / 4, high = k / 16;
    const auto code = static_cast<int8_t>(tile[pair * 512 + lane * 16 + (odd + 2 * high) * 4 + k % 4]);
    const __half scale = reinterpret_cast<const __half*>(tile + m.pairs * 512)[(pair * 8 + g) * 2 + odd];
    return __half2float(scale) * static_cast<float>(code);
  }
  const uint8_t* from = tile + pair * kMx4PairBytes;
  const uint32_t word = reinterpret_cast<const uint32_t*>(from)[(4 * g + k / 8) * 2 + odd];
  const uint8_t exponent = decode_mx4_scale(from[kMx4ScalesAt + g * 2 + odd]);
  return e8m0_to_float(exponent) * e2m1_to_float(decode_mx4(word, k % 8));
}

// One CTA per token.
__global__ void __launch_bounds__(kThreads)
    embed_packed_kernel(PackedMatrix table, const int32_t* tokens, float scale, float* out) {
  const int64_t t = blockIdx.x, row = tokens[t];
  for (int c = threadIdx.x; c < table.cols; c += kThreads) {
    out[t * table.cols + c] = packed_element(table, row, c) * scale;
  }
}

}  // namespace

void launch_embed_packed(const PackedMatrix& table, const int32_t* tokens, int64_t count, float scale,
                         float* out, cudaStream_t stream) {
  if (count == 0) return;
  embed_packed_kernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(table, tokens, scale, out);
  check_launch("embed_packed_kernel");
}

PackedFormat packed_format(DType type) {
  switch (type) {
    case DType::kQ8_0:
    case DType::kQ4_0:
    case DType::kQ5_0:
      return PackedFormat::kQ8;
    case DType::kMXFP4:
    case DType::kMXFP4Split:
      return PackedFormat::kMx4;
    default:
      return PackedFormat::kNone;
  }
}

PackedMatrix packed_shape(DType type, int64_t rows, int64_t cols) {
  PackedMatrix shape;
  shape.format = packed_format(type);
  shape.rows = rows;
  shape.cols = cols;
  shape.tiles_per_expert = static_cast<int32_t>((rows + kTileRows - 1) / kTileRows);
  shape.pairs = packed_pairs(cols);
  shape.tile_bytes = static_cast<uint32_t>(shape.pairs) * pair_bytes(shape.format);
  return shape;
}

void launch_repack(const DeviceMatrix& from, int64_t experts, const PackedMatrix& to, uint8_t* tiles,
                   cudaStream_t stream) {
  const int64_t count = experts * to.tiles_per_expert;
  if (count == 0 || to.pairs == 0) return;
  const int64_t blocks = (count * to.pairs * kWarpLanes + kThreads - 1) / kThreads;
  constexpr int64_t kMaxBlocks = 1 << 16;
  repack_kernel<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(
      from, count, to, tiles);
  check_launch("repack_kernel");
}

}  // namespace millrace::cuda
