// Repacking at load: one thread per (tile, K step, lane) gathers its 16 codes, or eight elements; and
// dequantizing what was repacked, a warp per K step. See packed_tiles.h for the layouts.
#include <cuda_fp16.h>

#include "base/check.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/dequantize_low_bits.cuh"
#include "kernels/cuda/quant/mxfp4.cuh"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/weight_format.cuh"
#include "kernels/quant/blocks.h"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;

// e2m1 nibble of element k: GGUF's blocks and Hugging Face's split planes differ in the order.
__device__ inline uint32_t nibble_code(DType type, const uint8_t* codes, int k) {
  if (type == DType::kMXFP4) return (codes[k % 16] >> (4 * (k / 16))) & 15u;
  return (codes[k / 2] >> (4 * (k % 2))) & 15u;
}

struct Source {
  const uint8_t* row;  // null in the padding
  const uint8_t* scales;
  int64_t blocks;
};

__device__ inline Source source_of(const DeviceMatrix& from, const PackedMatrix& to, int64_t row) {
  if (row >= to.rows) return {nullptr, nullptr, 0};
  return {from.data + row * from.row_bytes,
          from.scales != nullptr ? from.scales + row * from.scales_per_row : nullptr, to.cols / 32};
}

__device__ inline void repack_q8(const DeviceMatrix& from, const Source& source, int64_t k_step, int g, int t,
                                 uint8_t* tile) {
  uint32_t words[4] = {};
  uint16_t scales[2] = {};
  for (int odd = 0; odd < 2; ++odd) {
    const int64_t b = 2 * k_step + odd;
    if (source.row == nullptr || b >= source.blocks) continue;
    const uint8_t* block = source.row + b * (from.row_bytes / source.blocks);
    scales[odd] = encode_q8_scale(half_bits_to_float(static_cast<uint16_t>(block[0] | block[1] << 8)));
    for (int i = 0; i < 8; ++i) {
      const auto code = static_cast<uint32_t>(static_cast<int8_t>(block[2 + 8 * t + i]) + 128);
      words[2 * odd + i / 4] |= code << (8 * (i % 4));
    }
  }
  uint8_t* to = tile + k_step * kQ8KStepBytes;
  *reinterpret_cast<uint4*>(to + (4 * g + t) * 16) = {words[0], words[1], words[2], words[3]};
  if (t == 0) {
    *reinterpret_cast<uint32_t*>(to + kQ8ScalesAt + g * 4) = scales[0] | static_cast<uint32_t>(scales[1])
                                                                             << 16;
  }
}

__device__ inline void repack_mxfp4(const DeviceMatrix& from, const Source& source, int64_t k_step, int g,
                                    int t, uint8_t* tile) {
  const bool split = from.type == DType::kMXFP4Split;
  uint32_t words[2] = {};
  uint8_t scales[2] = {};
  for (int odd = 0; odd < 2; ++odd) {
    const int64_t b = 2 * k_step + odd;
    if (source.row == nullptr || b >= source.blocks) continue;
    const uint8_t* codes = split ? source.row + b * 16 : source.row + b * 17 + 1;
    scales[odd] = encode_mxfp4_scale(split ? source.scales[b] : codes[-1]);
    uint32_t plain = 0;
    for (int i = 0; i < 8; ++i) plain |= nibble_code(from.type, codes, 8 * t + i) << (4 * i);
    words[odd] = encode_mxfp4(plain);
  }
  uint8_t* to = tile + k_step * kMxfp4KStepBytes;
  *reinterpret_cast<uint2*>(to + (4 * g + t) * 8) = {words[0], words[1]};
  if (t == 0) {
    *reinterpret_cast<uint16_t*>(to + kMxfp4ScalesAt + g * 2) =
        static_cast<uint16_t>(scales[0] | scales[1] << 8);
  }
}

// Eight elements of a row that share a scale, as kQ4 to kQ6 have them.
struct AffineCodes {
  uint32_t code[8];
  float scale, min;   // the weight is code * scale - min,
  float zero = 0.0f;  // or (code - zero) * scale, where it is not 0
};
// Columns c to c + 7.
__device__ inline AffineCodes affine_codes(DType type, const uint8_t* row, int64_t c) {
  AffineCodes to;
  uint64_t q = 0, more = 0;  // nibbles; what lies above them, in byte i for element i
  int high = 0;              // which nibbles
  const int j = static_cast<int>(c % kBlock), e = static_cast<int>(c % kSuperBlock), s = e / 32;
  const auto block = [&](size_t bytes, int elements) {
    return row + c / elements * static_cast<int64_t>(bytes);
  };
  const auto fifth_bits = [&](const uint8_t* bits) {
    for (int i = 0; i < 8; ++i) more |= static_cast<uint64_t>(bits[j / 8] >> i & 1u) << (8 * i);
  };
  switch (type) {
    case DType::kQ4_0:
    case DType::kQ5_0: {
      const bool five = type == DType::kQ5_0;
      const uint8_t* b = block(five ? sizeof(quant::BlockQ5_0) : sizeof(quant::BlockQ4_0), kBlock);
      to.scale = half_at(b), to.min = 0.0f, to.zero = five ? 16.0f : 8.0f;
      q = load_bytes8<2>(b + (five ? 6 : 2) + j % 16), high = j / 16;
      if (five) fifth_bits(b + 2);
      break;
    }
    case DType::kQ4_1:
    case DType::kQ5_1: {
      const bool five = type == DType::kQ5_1;
      const uint8_t* b = block(five ? sizeof(quant::BlockQ5_1) : sizeof(quant::BlockQ4_1), kBlock);
      to.scale = half_at(b), to.min = -half_at(b + 2);
      q = load_bytes8<2>(b + (five ? 8 : 4) + j % 16), high = j / 16;
      if (five) fifth_bits(b + 4);
      break;
    }
    case DType::kQ4_Z: {
      const uint8_t* b = block(sizeof(quant::BlockQ4_Z), kBlock);
      const auto dz = static_cast<uint16_t>(b[0] | b[1] << 8);
      to.scale = std::bit_cast<float>(quant::q4_z_scale_bits(dz)), to.min = -to.scale * quant::q4_z_min(dz);
      q = load_bytes8<2>(b + 2 + j % 16), high = j / 16;
      break;
    }
    case DType::kQ4_K: {
      const uint8_t* b = block(sizeof(quant::BlockQ4_K), kSuperBlock);
      const float2 scale = scale_and_min<quant::BlockQ4_K>(b, s);
      to.scale = scale.x, to.min = scale.y;
      q = load_bytes8<8>(b + offsetof(quant::BlockQ4_K, q) + 32 * (s / 2) + e % 32), high = s & 1;
      break;
    }
    case DType::kQ5_K: {
      const uint8_t* b = block(sizeof(quant::BlockQ5_K), kSuperBlock);
      const float2 scale = scale_and_min<quant::BlockQ5_K>(b, s);
      to.scale = scale.x, to.min = scale.y;
      q = load_bytes8<8>(b + offsetof(quant::BlockQ5_K, q) + 32 * (s / 2) + e % 32), high = s & 1;
      more = load_bytes8<8>(b + offsetof(quant::BlockQ5_K, high) + e % 32) >> s & 0x0101010101010101u;
      break;
    }
    default: {  // Q6_K
      const uint8_t* b = block(sizeof(quant::BlockQ6_K), kSuperBlock);
      const int h = e / 128, r = e / 32 % 4;
      to.scale = half_at(b + offsetof(quant::BlockQ6_K, d)) *
                 static_cast<float>(static_cast<int8_t>(b[offsetof(quant::BlockQ6_K, scales) + e / 16]));
      to.min = 0.0f, to.zero = 32.0f;
      q = load_bytes8<2>(b + offsetof(quant::BlockQ6_K, low) + 64 * h + 32 * (r & 1) + e % 32), high = r >> 1;
      more = load_bytes8<2>(b + offsetof(quant::BlockQ6_K, high) + 32 * h + e % 32) >> (2 * r) &
             0x0303030303030303u;
    }
  }
  for (int i = 0; i < 8; ++i) to.code[i] = nibble_of(q, i, high) | byte_of(more, i) << 4;
  return to;
}

template <int kBits>
__device__ inline void repack_affine(const DeviceMatrix& from, const Source& source, int64_t k_step, int g,
                                     int t, uint8_t* to) {
  uint32_t words[2] = {}, rest = 0;
  uint16_t scales[2] = {}, mins[2] = {};
  for (int odd = 0; odd < 2; ++odd) {
    const int64_t b = 2 * k_step + odd;
    if (source.row == nullptr || b >= source.blocks) continue;
    const AffineCodes codes = affine_codes(from.type, source.row, 32 * b + 8 * t);
    scales[odd] = encode_q8_scale(codes.scale);
    // A whole number of scales is exact.
    mins[odd] = encode_affine_min(codes.zero != 0.0f ? codes.zero * decode_q8_scale(scales[odd]) : codes.min);
    for (int i = 0; i < 8; ++i) affine_put<kBits>(codes.code[i], odd, i, words[odd], rest);
  }
  const int lane = 4 * g + t;
  reinterpret_cast<uint2*>(to)[lane] = {words[0], words[1]};
  if (kBits == 5) reinterpret_cast<uint16_t*>(to + kAffineRestAt)[lane] = narrow_fifth_bits(rest);
  if (kBits == 6) reinterpret_cast<uint32_t*>(to + kAffineRestAt)[lane] = rest;
  const uint32_t both = scales[0] | static_cast<uint32_t>(scales[1]) << 16;
  if (kBits == 6 && t % 2 == 0) reinterpret_cast<uint32_t*>(to + kQ6ScalesAt)[lane / 2] = both;
  if (kBits < 6 && t == 0) {
    reinterpret_cast<uint2*>(to + (kBits == 4 ? kQ4ScalesAt : kQ5ScalesAt))[g] = {
        both, mins[0] | static_cast<uint32_t>(mins[1]) << 16};
  }
}

__global__ void __launch_bounds__(kThreads) repack_kernel(DeviceMatrix from, PackedMatrix to, uint8_t* out) {
  const int64_t count = int64_t{to.tiles_per_expert} * to.k_steps * kWarpLanes;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int lane = static_cast<int>(i % kWarpLanes), g = lane / 4, t = lane % 4;
    const int64_t k_step = i / kWarpLanes % to.k_steps, tile = i / kWarpLanes / to.k_steps;
    uint8_t* to_tile = out + tile * to.tile_bytes;
    const Source source = source_of(from, to, tile * kTileRows + g);
    uint8_t* to_step = to_tile + k_step * k_step_bytes(to.format);
    switch (to.format) {
      case PackedFormat::kMxfp4:
        repack_mxfp4(from, source, k_step, g, t, to_tile);
        break;
      case PackedFormat::kQ4:
        repack_affine<4>(from, source, k_step, g, t, to_step);
        break;
      case PackedFormat::kQ5:
        repack_affine<5>(from, source, k_step, g, t, to_step);
        break;
      case PackedFormat::kQ6:
        repack_affine<6>(from, source, k_step, g, t, to_step);
        break;
      default:
        repack_q8(from, source, k_step, g, t, to_tile);
    }
  }
}

// Eight elements a thread, of whatever type.
template <class Decoder>
__global__ void __launch_bounds__(kThreads)
    round_kernel(DeviceMatrix from, int64_t first_row, PackedMatrix to, uint8_t* out) {
  const int64_t count = int64_t{to.tiles_per_expert} * to.k_steps * 64;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int chunk = static_cast<int>(i % 8), row = static_cast<int>(i / 8 % 8);
    const int64_t k_step = i / 64 % to.k_steps, tile = i / 64 / to.k_steps;
    const int64_t at = tile * kTileRows + row, column = k_step * kKStepColumns + chunk * 8;
    float w[8] = {};
    if (at < to.rows && column < to.cols) Decoder::decode8(from, first_row + at, column, 8, w);
    *reinterpret_cast<uint4*>(out + tile * to.tile_bytes + k_step * kBf16KStepBytes +
                              bf16_chunk(static_cast<uint32_t>(row), static_cast<uint32_t>(chunk))) = {
        bf16_pair(w[0], w[1]), bf16_pair(w[2], w[3]), bf16_pair(w[4], w[5]), bf16_pair(w[6], w[7])};
  }
}

// tiles: [k_steps] of codes, of all tiles; to: as many of kBf16. A warp per K step: 320 to 544 bytes in and
// 1,024 out, each in one run. A chunk of 16 bytes is a word of each of four lanes, so a k_step goes through
// shared memory; the swizzle puts the 32 words that are written together into 32 banks. Roofline: memory,
// 0.63 to 1.06 + 2 bytes a weight.
template <PackedFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const uint8_t* tiles, int64_t k_steps, uint8_t* to) {
  __shared__ __align__(16) uint8_t staged[kWarps][kBf16KStepBytes];
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes,
            warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const auto g = static_cast<uint32_t>(lane) / 4, t = static_cast<uint32_t>(lane) % 4;
  uint8_t* const own = staged[warp];
  for (int64_t k_step = int64_t{blockIdx.x} * kWarps + warp; k_step < k_steps;
       k_step += int64_t{gridDim.x} * kWarps) {
    uint32_t w[4][2];
    TileFormat<kFormat>::load(tiles + k_step * TileFormat<kFormat>::kKStepBytes, lane, w);
#pragma unroll
    for (uint32_t step = 0; step < 4; ++step) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        *reinterpret_cast<uint32_t*>(own + bf16_chunk(g, 2 * step + half) + 4 * t) = w[step][half];
    }
    __syncwarp();  // the k_step is there
    const auto* const from = reinterpret_cast<const uint4*>(own);
    auto* const out = reinterpret_cast<uint4*>(to + k_step * kBf16KStepBytes);
    out[lane] = from[lane];
    out[lane + kWarpLanes] = from[lane + kWarpLanes];
    __syncwarp();  // everybody has read it
  }
}

// Element k of a block of kQ4 to kQ6; `from` is its K step.
template <int kBits>
__device__ inline float affine_element(const uint8_t* from, int g, int odd, int k) {
  const int lane = 4 * g + k / 8;
  const uint2 words = reinterpret_cast<const uint2*>(from)[lane];
  uint32_t rest = 0;
  if (kBits == 5) rest = widen_fifth_bits(reinterpret_cast<const uint16_t*>(from + kAffineRestAt)[lane]);
  if (kBits == 6) rest = reinterpret_cast<const uint32_t*>(from + kAffineRestAt)[lane];
  const auto code = static_cast<int>(affine_code<kBits>(odd ? words.y : words.x, rest, odd, k % 8));
  if (kBits == 6) {
    const auto* scales = reinterpret_cast<const uint16_t*>(from + kQ6ScalesAt) + lane / 2 * 2;
    return decode_q8_scale(scales[odd]) * static_cast<float>(code - 32);
  }
  const auto* scales =
      reinterpret_cast<const uint16_t*>(from + (kBits == 4 ? kQ4ScalesAt : kQ5ScalesAt)) + g * 4;
  return decode_q8_scale(scales[odd]) * static_cast<float>(code) - decode_affine_min(scales[2 + odd]);
}

// Element c of a row, of the tile that holds it.
__device__ inline float packed_element(const PackedMatrix& m, int64_t row, int c) {
  const int g = static_cast<int>(row % kTileRows), odd = c / 32 % 2, k = c % 32;
  const uint8_t* from =
      m.tiles + row / kTileRows * m.tile_bytes + int64_t{c / kKStepColumns} * k_step_bytes(m.format);
  if (m.format == PackedFormat::kBf16) {
    const uint8_t* chunk = from + bf16_chunk(static_cast<uint32_t>(g), static_cast<uint32_t>(c % 64 / 8));
    return bf16_bits_to_float(reinterpret_cast<const uint16_t*>(chunk)[c % 8]);
  }
  if (m.format == PackedFormat::kQ8) {
    const int code = from[(4 * g + k / 8) * 16 + odd * 8 + k % 8] - 128;
    return decode_q8_scale(reinterpret_cast<const uint16_t*>(from + kQ8ScalesAt)[g * 2 + odd]) *
           static_cast<float>(code);
  }
  if (m.format == PackedFormat::kQ4) return affine_element<4>(from, g, odd, k);
  if (m.format == PackedFormat::kQ5) return affine_element<5>(from, g, odd, k);
  if (m.format == PackedFormat::kQ6) return affine_element<6>(from, g, odd, k);
  const uint32_t word = reinterpret_cast<const uint32_t*>(from)[(4 * g + k / 8) * 2 + odd];
  const uint8_t exponent = decode_mxfp4_scale(from[kMxfp4ScalesAt + g * 2 + odd]);
  return e8m0_to_float(exponent) * e2m1_to_float(decode_mxfp4(word, k % 8));
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
                         float* out, const Launch& at) {
  if (count == 0) return;
  embed_packed_kernel<<<static_cast<unsigned>(count), kThreads, 0, at.stream>>>(table, tokens, scale, out);
  check_launch("embed_packed_kernel");
}

PackedFormat packed_format(DType type, int64_t cols) {
  if (cols % 32 != 0) return PackedFormat::kNone;
  switch (type) {
    case DType::kQ8_0:
      return PackedFormat::kQ8;
    case DType::kQ4_0:
    case DType::kQ4_1:
    case DType::kQ4_Z:
    case DType::kQ4_K:
      return PackedFormat::kQ4;
    case DType::kQ5_0:
    case DType::kQ5_1:
    case DType::kQ5_K:
      return PackedFormat::kQ5;
    case DType::kQ6_K:
      return PackedFormat::kQ6;
    case DType::kMXFP4:
    case DType::kMXFP4Split:
      return PackedFormat::kMxfp4;
    case DType::kF32:
    case DType::kI32:
    case DType::kU8:
      return PackedFormat::kNone;
    default:
      return PackedFormat::kBf16;
  }
}

PackedMatrix packed_shape(DType type, int64_t rows, int64_t cols) {
  PackedMatrix shape;
  shape.format = packed_format(type, cols);
  shape.rows = rows;
  shape.cols = cols;
  shape.tiles_per_expert = static_cast<int32_t>((rows + kTileRows - 1) / kTileRows);
  shape.k_steps = packed_k_steps(cols);
  shape.tile_bytes = static_cast<uint32_t>(shape.k_steps) * k_step_bytes(shape.format);
  return shape;
}

void launch_repack(const DeviceMatrix& from, int64_t first_row, const PackedMatrix& to, uint8_t* tiles,
                   const Launch& at) {
  const int64_t per_k_step = to.format == PackedFormat::kBf16 ? 64 : kWarpLanes;
  const int64_t blocks = (int64_t{to.tiles_per_expert} * to.k_steps * per_k_step + kThreads - 1) / kThreads;
  if (blocks == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 16;
  const auto grid = static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  if (to.format != PackedFormat::kBf16) {
    repack_kernel<<<grid, kThreads, 0, at.stream>>>(from, to, tiles);
    return check_launch("repack_kernel");
  }
  DeviceMatrix shifted = from;  // decoders number rows as the grid of scales does
  shifted.data -= first_row * from.row_bytes;
  with_any_decoder(from.type, [&](auto decoder) {
    round_kernel<decltype(decoder)><<<grid, kThreads, 0, at.stream>>>(shifted, first_row, to, tiles);
  });
  check_launch("round_kernel");
}

size_t dequantized_bytes(const PackedMatrix& packed) {
  if (!has_codes(packed.format)) return 0;
  return static_cast<size_t>(packed.tiles_per_expert) * static_cast<size_t>(packed.k_steps) * kBf16KStepBytes;
}

void launch_dequantize(const PackedMatrix& packed, uint8_t* to, const Launch& at) {
  MILLRACE_CHECK(has_codes(packed.format));
  const int64_t k_steps = int64_t{packed.tiles_per_expert} * packed.k_steps,
                blocks = (k_steps + kWarps - 1) / kWarps;
  if (blocks == 0) return;
  constexpr int64_t kPerSm = 2048 / kThreads;  // all its warps: 35 KB on their way to it
  const int64_t max_blocks = at.device.sm_count() * kPerSm;
  const auto grid = static_cast<unsigned>(blocks < max_blocks ? blocks : max_blocks);
  const auto kernel = packed.format == PackedFormat::kQ4   ? dequantize_kernel<PackedFormat::kQ4>
                      : packed.format == PackedFormat::kQ5 ? dequantize_kernel<PackedFormat::kQ5>
                      : packed.format == PackedFormat::kQ6 ? dequantize_kernel<PackedFormat::kQ6>
                                                           : dequantize_kernel<PackedFormat::kQ8>;
  kernel<<<grid, kThreads, 0, at.stream>>>(packed.tiles, k_steps, to);
  check_launch("dequantize_kernel");
}

}  // namespace millrace::cuda
