// Eight consecutive weights of a row as float32, for every weight type: what the matrix and embedding kernels
// are built on. Layouts are quant/blocks.h; the arithmetic is quant/codec.cpp's to the bit (the build has
// -fmad=false), which decode_test.cu checks on the host: that is why these are host functions too.
//
// A decoder is a struct with
//   static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int n, float* w)
// that writes elements [c, c + n) of a row to w[0, n) and zeros to w[n, 8). c is a multiple of 8; n is 8
// except at the end of a row of a plain type. No decoder reads outside the row. Eight is the largest run that
// every type keeps under one scale, and a warp of such runs is a super-block of 256.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/quant/device_matrix.h"
#include "kernels/quant/blocks.h"

namespace millrace::cuda {

using quant::kBlock;
using quant::kSuperBlock;

__host__ __device__ inline float half_bits_to_float(uint16_t bits) { return __half2float(__half_raw{bits}); }
__host__ __device__ inline float bf16_bits_to_float(uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}
__host__ __device__ inline float fp8_bits_to_float(uint8_t bits) {
  return __half2float(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3));
}
__host__ __device__ inline float e8m0_to_float(uint8_t bits) {
  if (bits == 255) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(bits == 0 ? 0x00400000u : static_cast<uint32_t>(bits) << 23);
}

// The magnitudes of quant::kE2M1Doubled as nibbles of one word: a table without memory.
inline constexpr uint32_t kE2M1Magnitudes = 0xc8643210u;
constexpr bool e2m1_matches() {
  for (int code = 0; code < 16; ++code) {
    const int magnitude = static_cast<int>((kE2M1Magnitudes >> (4 * (code & 7))) & 15u);
    if (quant::kE2M1Doubled[code] != (code < 8 ? magnitude : -magnitude)) return false;
  }
  return true;
}
static_assert(e2m1_matches());

__host__ __device__ inline float e2m1_to_float(uint32_t code) {
  const int magnitude = static_cast<int>((kE2M1Magnitudes >> (4 * (code & 7u))) & 15u);
  return 0.5f * static_cast<float>((code & 8u) != 0 ? -magnitude : magnitude);
}

// Eight bytes at an address that is a multiple of kAlign, as one little-endian number.
template <int kAlign>
__host__ __device__ inline uint64_t load_bytes8(const uint8_t* p) {
  uint64_t value = 0;
  if constexpr (kAlign == 8) {
    value = *reinterpret_cast<const uint64_t*>(p);
  } else if constexpr (kAlign == 4) {
    const auto* words = reinterpret_cast<const uint32_t*>(p);
    value = words[0] | static_cast<uint64_t>(words[1]) << 32;
  } else if constexpr (kAlign == 2) {
    const auto* halves = reinterpret_cast<const uint16_t*>(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) value |= static_cast<uint64_t>(halves[i]) << (16 * i);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(p[i]) << (8 * i);
  }
  return value;
}

__host__ __device__ inline uint32_t byte_of(uint64_t bytes, int i) {
  return static_cast<uint32_t>(bytes >> (8 * i)) & 255u;
}
__host__ __device__ inline uint32_t nibble_of(uint64_t bytes, int i, int high) {
  return static_cast<uint32_t>(bytes >> (8 * i + 4 * high)) & 15u;
}
// Two bytes of a block whose size and field offset are even.
__host__ __device__ inline float half_at(const uint8_t* p) {
  return half_bits_to_float(*reinterpret_cast<const uint16_t*>(p));
}

// The block of type Block that holds element c, for blocks of `elements`.
template <class Block>
__host__ __device__ inline const uint8_t* block_at(const DeviceMatrix& m, int64_t row, int64_t c,
                                                   int elements) {
  return m.data + row * m.row_bytes + c / elements * static_cast<int64_t>(sizeof(Block));
}

// ---------------------------------------------------------------- plain types

struct DecodeF32 {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int n, float* w) {
    const auto* p = reinterpret_cast<const float*>(m.data + row * m.row_bytes) + c;
    if (n == 8 && m.row_bytes % 16 == 0) {
      const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
      w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i < n ? p[i] : 0.0f;
  }
};

// kF16 and kBF16 differ in what their bits mean only.
template <bool kBFloat>
struct Decode16 {
  __host__ __device__ static float widen(uint32_t bits) {
    return kBFloat ? bf16_bits_to_float(bits) : half_bits_to_float(static_cast<uint16_t>(bits));
  }
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int n, float* w) {
    const auto* p = reinterpret_cast<const uint16_t*>(m.data + row * m.row_bytes) + c;
    if (n == 8 && m.row_bytes % 16 == 0) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = widen((words[i / 2] >> (16 * (i % 2))) & 0xffffu);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i < n ? widen(p[i]) : 0.0f;
  }
};

// The scale of element (row, c) when scales lie beside the values.
__host__ __device__ inline float grid_scale(const DeviceMatrix& m, int64_t row, int64_t c) {
  const int64_t at = row / m.rows_per_scale * m.scales_per_row + c / m.cols_per_scale;
  if (m.scale_type == DType::kU8) return e8m0_to_float(m.scales[at]);
  if (m.scale_type == DType::kBF16)
    return bf16_bits_to_float(reinterpret_cast<const uint16_t*>(m.scales)[at]);
  return reinterpret_cast<const float*>(m.scales)[at];
}

struct DecodeF8E4M3 {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int n, float* w) {
    const uint8_t* p = m.data + row * m.row_bytes + c;
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i < n ? fp8_bits_to_float(p[i]) : 0.0f;
    if (m.scales == nullptr) return;
    const bool one_scale = m.cols_per_scale % 8 == 0;
    const float first = grid_scale(m, row, c);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < n) w[i] *= one_scale ? first : grid_scale(m, row, c + i);
    }
  }
};

// ---------------------------------------------------------------- blocks of 32

struct DecodeQ8_0 {
  using Block = quant::BlockQ8_0;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const float d = half_at(b + offsetof(Block, d));
    const uint64_t q = load_bytes8<2>(b + offsetof(Block, q) + c % kBlock);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = d * static_cast<float>(static_cast<int8_t>(byte_of(q, i)));
  }
};

struct DecodeQ4_0 {
  using Block = quant::BlockQ4_0;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const int j = static_cast<int>(c % kBlock);
    const float d = half_at(b + offsetof(Block, d));
    const uint64_t q = load_bytes8<2>(b + offsetof(Block, q) + j % 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = d * static_cast<float>(static_cast<int>(nibble_of(q, i, j / 16)) - 8);
  }
};

struct DecodeQ4_1 {
  using Block = quant::BlockQ4_1;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const int j = static_cast<int>(c % kBlock);
    const float d = half_at(b + offsetof(Block, d)), low = half_at(b + offsetof(Block, m));
    const uint64_t q = load_bytes8<4>(b + offsetof(Block, q) + j % 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = d * static_cast<float>(nibble_of(q, i, j / 16)) + low;
  }
};

struct DecodeQ4_Z {
  using Block = quant::BlockQ4_Z;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const int j = static_cast<int>(c % kBlock);
    const auto dz = static_cast<uint16_t>(b[0] | b[1] << 8);
    const float d = std::bit_cast<float>(quant::q4_z_scale_bits(dz)), low = d * quant::q4_z_min(dz);
    const uint64_t q = load_bytes8<2>(b + offsetof(Block, q) + j % 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = d * static_cast<float>(nibble_of(q, i, j / 16)) + low;
  }
};

struct DecodeQ5_0 {
  using Block = quant::BlockQ5_0;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const int j = static_cast<int>(c % kBlock);
    const float d = half_at(b + offsetof(Block, d));
    const uint32_t fifth = b[offsetof(Block, high) + j / 8];
    const uint64_t q = load_bytes8<2>(b + offsetof(Block, q) + j % 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = nibble_of(q, i, j / 16) | ((fifth >> i) & 1u) << 4;
      w[i] = d * static_cast<float>(static_cast<int>(code) - 16);
    }
  }
};

struct DecodeQ5_1 {
  using Block = quant::BlockQ5_1;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const int j = static_cast<int>(c % kBlock);
    const float d = half_at(b + offsetof(Block, d)), low = half_at(b + offsetof(Block, m));
    const uint32_t fifth = b[offsetof(Block, high) + j / 8];
    const uint64_t q = load_bytes8<8>(b + offsetof(Block, q) + j % 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = d * static_cast<float>(nibble_of(q, i, j / 16) | ((fifth >> i) & 1u) << 4) + low;
    }
  }
};

struct DecodeMXFP4 {
  using Block = quant::BlockMXFP4;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kBlock);
    const int j = static_cast<int>(c % kBlock);
    const float scale = e8m0_to_float(b[offsetof(Block, e)]);
    const uint64_t q = load_bytes8<1>(b + offsetof(Block, q) + j % 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = scale * e2m1_to_float(nibble_of(q, i, j / 16));
  }
};

struct DecodeMXFP4Split {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* p = m.data + row * m.row_bytes + c / 2;
    const bool one_scale = m.cols_per_scale % 8 == 0;
    const float first = grid_scale(m, row, c);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scale = one_scale ? first : grid_scale(m, row, c + i);
      w[i] = scale * e2m1_to_float((static_cast<uint32_t>(p[i / 2]) >> (4 * (i % 2))) & 15u);
    }
  }
};

// ---------------------------------------------------------------- super-blocks of 256

// The scale and the minimum of sub-block s, multiplied out.
template <class Block>
__host__ __device__ inline float2 scale_and_min(const uint8_t* b, int s) {
  uint8_t scale, min;
  quant::scale_min_k4(b + offsetof(Block, scales), s, &scale, &min);
  return {half_at(b + offsetof(Block, d)) * static_cast<float>(scale),
          half_at(b + offsetof(Block, dmin)) * static_cast<float>(min)};
}

struct DecodeQ4_K {
  using Block = quant::BlockQ4_K;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kSuperBlock);
    const int e = static_cast<int>(c % kSuperBlock), s = e / 32, i0 = e % 32;
    const float2 scale = scale_and_min<Block>(b, s);
    const uint64_t q = load_bytes8<8>(b + offsetof(Block, q) + 32 * (s / 2) + i0);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = scale.x * static_cast<float>(nibble_of(q, i, s & 1)) - scale.y;
  }
};

struct DecodeQ5_K {
  using Block = quant::BlockQ5_K;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kSuperBlock);
    const int e = static_cast<int>(c % kSuperBlock), s = e / 32, i0 = e % 32;
    const float2 scale = scale_and_min<Block>(b, s);
    const uint64_t fifth = load_bytes8<8>(b + offsetof(Block, high) + i0);
    const uint64_t q = load_bytes8<8>(b + offsetof(Block, q) + 32 * (s / 2) + i0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = nibble_of(q, i, s & 1) | ((byte_of(fifth, i) >> s) & 1u) << 4;
      w[i] = scale.x * static_cast<float>(code) - scale.y;
    }
  }
};

struct DecodeQ6_K {
  using Block = quant::BlockQ6_K;
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const uint8_t* b = block_at<Block>(m, row, c, kSuperBlock);
    const int e = static_cast<int>(c % kSuperBlock), h = e / 128, r = e / 32 % 4, i0 = e % 32;
    const auto sub_scale = static_cast<int8_t>(b[offsetof(Block, scales) + e / 16]);
    const float scale = half_at(b + offsetof(Block, d)) * static_cast<float>(sub_scale);
    const uint64_t low = load_bytes8<2>(b + offsetof(Block, low) + 64 * h + 32 * (r & 1) + i0);
    const uint64_t high = load_bytes8<2>(b + offsetof(Block, high) + 32 * h + i0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = nibble_of(low, i, r >> 1) | ((byte_of(high, i) >> (2 * r)) & 3u) << 4;
      w[i] = scale * static_cast<float>(static_cast<int>(code) - 32);
    }
  }
};

// Every instantiation: launch(Decoder{}) for the decoder of `type`. False for a type that has none.
template <class Launch>
bool with_decoder(DType type, Launch&& launch) {
  switch (type) {
    case DType::kF32:
      return launch(DecodeF32{}), true;
    case DType::kF16:
      return launch(Decode16<false>{}), true;
    case DType::kBF16:
      return launch(Decode16<true>{}), true;
    case DType::kF8E4M3:
      return launch(DecodeF8E4M3{}), true;
    case DType::kQ8_0:
      return launch(DecodeQ8_0{}), true;
    case DType::kQ4_0:
      return launch(DecodeQ4_0{}), true;
    case DType::kQ4_1:
      return launch(DecodeQ4_1{}), true;
    case DType::kQ5_0:
      return launch(DecodeQ5_0{}), true;
    case DType::kQ5_1:
      return launch(DecodeQ5_1{}), true;
    case DType::kQ4_K:
      return launch(DecodeQ4_K{}), true;
    case DType::kQ5_K:
      return launch(DecodeQ5_K{}), true;
    case DType::kQ6_K:
      return launch(DecodeQ6_K{}), true;
    case DType::kMXFP4:
      return launch(DecodeMXFP4{}), true;
    case DType::kQ4_Z:
      return launch(DecodeQ4_Z{}), true;
    case DType::kMXFP4Split:
      return launch(DecodeMXFP4Split{}), true;
    default:
      break;
  }
  return false;
}

}  // namespace millrace::cuda
