// Decoders of the types below four bits, of levels that are not even, and of NVFP4: what low_bits.cpp
// computes, to the bit (the build has -fmad=false), eight elements at a time, as dequantize.cuh has them.
// They are read once, when a weight is repacked into bf16 tiles, so that every block is read byte by byte: a
// block's alignment is 1.
#pragma once

#include "kernels/cuda/quant/dequantize.cuh"

namespace millrace::cuda {

// The block that holds element c, for blocks of kElements.
template <class Block, int kElements = kSuperBlock>
__host__ __device__ inline const Block& low_bit_block(const DeviceMatrix& m, int64_t row, int64_t c) {
  return *reinterpret_cast<const Block*>(block_at<Block>(m, row, c, kElements));
}
__host__ __device__ inline int nibble_at(const uint8_t* q, int i) { return (q[i / 2] >> (i % 2 * 4)) & 15; }

// quant::kIQ4Levels as bytes of two words: a table without memory.
inline constexpr uint64_t kIQ4LowLevels = 0xf6eaddcfbfad9881u, kIQ4HighLevels = 0x7159453526190d01u;
__host__ __device__ inline constexpr int iq4_level(uint32_t code) {
  const uint64_t levels = code < 8 ? kIQ4LowLevels : kIQ4HighLevels;
  return static_cast<int8_t>(levels >> (8 * (code % 8)) & 255u);
}
constexpr bool iq4_levels_match() {
  for (uint32_t code = 0; code < 16; ++code) {
    if (iq4_level(code) != quant::kIQ4Levels[code]) return false;
  }
  return true;
}
static_assert(iq4_levels_match());

// Entry `index` of a codebook of groups of kLength, times d, a minus where a bit of `signs` is set.
template <int kLength>
__host__ __device__ inline void put_entry(const DeviceMatrix& m, float d, uint32_t index, uint32_t signs,
                                          float* w) {
  const int8_t* entry = m.codebook + index * kLength;
#pragma unroll
  for (int j = 0; j < kLength; ++j) {
    const float x = d * static_cast<float>(entry[j]);
    w[j] = (signs >> j & 1u) != 0 ? -x : x;
  }
}
__host__ __device__ inline void put_shifted_entry(const DeviceMatrix& m, float d, uint32_t index, bool minus,
                                                  float* w) {
  const int8_t* entry = m.codebook + index * 8;
  const float shift = minus ? -0.125f : 0.125f;
#pragma unroll
  for (int j = 0; j < 8; ++j) w[j] = d * (static_cast<float>(entry[j]) + shift);
}
// Eight signs from seven bits: minuses are even in number.
__host__ __device__ inline uint32_t eight_signs(uint32_t bits) {
  uint32_t parity = bits ^ bits >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return bits | (parity & 1u) << 7;
}
__host__ __device__ inline uint32_t signs_of_word(uint32_t word, int group) {
  return eight_signs((word >> (7 * group)) & 127u);
}
__host__ __device__ inline float scale_of_word(uint32_t word) {
  return 0.5f + static_cast<float>(word >> 28);
}

// ---------------------------------------------------------------- levels

struct DecodeQ2_K {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockQ2_K>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock), scales = b.scales[e / 16];
    const float d = half_bits_to_float(b.d) * static_cast<float>(scales & 15);
    const float low = half_bits_to_float(b.dmin) * static_cast<float>(scales >> 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = d * static_cast<float>(quant::pair_code(b.q, e + i)) - low;
  }
};

struct DecodeQ3_K {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockQ3_K>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock);
    const float d = half_bits_to_float(b.d) * static_cast<float>(quant::scale_k3(b.scales, e / 16) - 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int third = (b.high[(e + i) % 32] >> (e / 32)) & 1;
      w[i] = d * static_cast<float>((quant::pair_code(b.q, e + i) | third << 2) - 4);
    }
  }
};

struct DecodeIQ4_NL {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ4_NL, kBlock>(m, row, c);
    const int j = static_cast<int>(c % kBlock);
    const float d = half_bits_to_float(b.d);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      w[i] = d * static_cast<float>(iq4_level((b.q[j % 16 + i] >> (4 * (j / 16))) & 15u));
  }
};

struct DecodeIQ4_XS {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ4_XS>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock), s = e / 32, j = e % 32;
    const float d = half_bits_to_float(b.d) * static_cast<float>(quant::scale_iq4_xs(b, s) - 32);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      w[i] = d * static_cast<float>(iq4_level((b.q[16 * s + j % 16 + i] >> (4 * (j / 16))) & 15u));
  }
};

struct DecodeTQ1_0 {
  // Byte `at` times three, `digit` times, keeps what is behind the digits before: the next is its first.
  __host__ __device__ static int digit_of(const quant::BlockTQ1_0& b, int e) {
    constexpr uint64_t kPowers = 0x511b090301u;  // of three, a byte each
    const int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
    const uint32_t from = e < 160 ? b.q[e % 32] : e < 240 ? b.q[32 + e % 16] : b.high[e % 4];
    const uint32_t rest = from * (static_cast<uint32_t>(kPowers >> (8 * digit)) & 255u) & 255u;
    return static_cast<int>(rest * 3 >> 8);
  }
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockTQ1_0>(m, row, c);
    const float d = half_bits_to_float(b.d);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = d * static_cast<float>(digit_of(b, static_cast<int>(c % kSuperBlock) + i) - 1);
    }
  }
};

struct DecodeTQ2_0 {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockTQ2_0>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock);
    const float d = half_bits_to_float(b.d);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = d * static_cast<float>(quant::pair_code(b.q, e + i) - 1);
  }
};

struct DecodeNVFP4 {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockNVFP4, quant::kNvBlock>(m, row, c);
    const int e = static_cast<int>(c % quant::kNvBlock), s = e / 16, high = e % 16 / 8;
    const float d = 0x1p-10f * static_cast<float>(quant::ue4m3_units(b.scales[s]));  // codes are doubled
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = (b.q[8 * s + i] >> (4 * high)) & 15u;
      const auto magnitude = static_cast<int>((kE2M1Magnitudes >> (4 * (code & 7u))) & 15u);
      w[i] = d * static_cast<float>((code & 8u) != 0 ? -magnitude : magnitude);
    }
  }
};

// ---------------------------------------------------------------- codebooks

struct DecodeIQ3_XXS {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ3_XXS>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock), s = e / 32, g = e % 32 / 8;
    const float d = half_bits_to_float(b.d) * scale_of_word(b.signs[s]) * 0.5f;
    const uint32_t signs = signs_of_word(b.signs[s], g);
    put_entry<4>(m, d, b.q[8 * s + 2 * g], signs, w);
    put_entry<4>(m, d, b.q[8 * s + 2 * g + 1], signs >> 4, w + 4);
  }
};

struct DecodeIQ3_S {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ3_S>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock), s = e / 32;
    const float d = half_bits_to_float(b.d) * static_cast<float>(1 + 2 * nibble_at(b.scales, s));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int g = e / 4 + half;
      const uint32_t index = b.q[g] | ((static_cast<uint32_t>(b.high[s]) >> (g % 8)) & 1u) << 8;
      put_entry<4>(m, d, index, static_cast<uint32_t>(b.signs[g / 2]) >> (4 * half), w + 4 * half);
    }
  }
};

struct DecodeIQ2_XXS {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ2_XXS>(m, row, c);
    const int e = static_cast<int>(c % kSuperBlock), s = e / 32, g = e % 32 / 8;
    const uint32_t indices = b.q[s][0], word = b.q[s][1];
    const float d = half_bits_to_float(b.d) * scale_of_word(word) * 0.25f;
    put_entry<8>(m, d, (indices >> (8 * g)) & 255u, signs_of_word(word, g), w);
  }
};

// The scale of eight elements of IQ2_XS and IQ2_S.
template <class Block>
__host__ __device__ inline float iq2_scale(const Block& b, int g) {
  return half_bits_to_float(b.d) * (0.5f + static_cast<float>(nibble_at(b.scales, g / 2))) * 0.25f;
}

struct DecodeIQ2_XS {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ2_XS>(m, row, c);
    const int g = static_cast<int>(c % kSuperBlock) / 8;
    const uint32_t code = b.q[g];
    put_entry<8>(m, iq2_scale(b, g), code & 511u, eight_signs(code >> 9), w);
  }
};

struct DecodeIQ2_S {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ2_S>(m, row, c);
    const int g = static_cast<int>(c % kSuperBlock) / 8;
    const uint32_t index = b.q[g] | ((static_cast<uint32_t>(b.high[g / 4]) >> (g % 4 * 2)) & 3u) << 8;
    put_entry<8>(m, iq2_scale(b, g), index, b.signs[g], w);
  }
};

struct DecodeIQ1_S {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ1_S>(m, row, c);
    const int g = static_cast<int>(c % kSuperBlock) / 8;
    const uint32_t high = b.high[g / 4], index = b.q[g] | ((high >> (g % 4 * 3)) & 7u) << 8;
    const float d = half_bits_to_float(b.d) * static_cast<float>(2 * ((high >> 12) & 7u) + 1);
    put_shifted_entry(m, d, index, (high & 0x8000u) != 0, w);
  }
};

struct DecodeIQ1_M {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int, float* w) {
    const auto& b = low_bit_block<quant::BlockIQ1_M>(m, row, c);
    const int g = static_cast<int>(c % kSuperBlock) / 8, s = g / 2, high = nibble_at(b.high, g);
    const uint32_t scales[4] = {b.scales[0], b.scales[1], b.scales[2], b.scales[3]};
    const uint32_t unit =
        scales[0] >> 12 | scales[1] >> 12 << 4 | scales[2] >> 12 << 8 | scales[3] >> 12 << 12;
    const uint32_t of_s = (static_cast<uint32_t>(b.scales[s / 4]) >> (s % 4 * 3)) & 7u;
    const float d = half_bits_to_float(static_cast<uint16_t>(unit)) * static_cast<float>(2 * of_s + 1);
    put_shifted_entry(m, d, b.q[g] | (static_cast<uint32_t>(high) & 7u) << 8, (high & 8) != 0, w);
  }
};

// Times the factor that lies beside the blocks, of the tensor or of an expert (GGUF's NVFP4), where there is
// one.
template <class Decoder>
struct Factored {
  __host__ __device__ static void decode8(const DeviceMatrix& m, int64_t row, int64_t c, int n, float* w) {
    Decoder::decode8(m, row, c, n, w);
    if (m.scales == nullptr) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] *= grid_scale(m, row, c + i);
  }
};

// Every instantiation: with_decoder's, and these. False for a type that has none.
template <class Launch>
bool with_any_decoder(DType type, Launch&& launch) {
  switch (type) {
    case DType::kQ2_K:
      return launch(Factored<DecodeQ2_K>{}), true;
    case DType::kQ3_K:
      return launch(Factored<DecodeQ3_K>{}), true;
    case DType::kIQ4_NL:
      return launch(Factored<DecodeIQ4_NL>{}), true;
    case DType::kIQ4_XS:
      return launch(Factored<DecodeIQ4_XS>{}), true;
    case DType::kIQ3_XXS:
      return launch(Factored<DecodeIQ3_XXS>{}), true;
    case DType::kIQ3_S:
      return launch(Factored<DecodeIQ3_S>{}), true;
    case DType::kIQ2_XXS:
      return launch(Factored<DecodeIQ2_XXS>{}), true;
    case DType::kIQ2_XS:
      return launch(Factored<DecodeIQ2_XS>{}), true;
    case DType::kIQ2_S:
      return launch(Factored<DecodeIQ2_S>{}), true;
    case DType::kIQ1_S:
      return launch(Factored<DecodeIQ1_S>{}), true;
    case DType::kIQ1_M:
      return launch(Factored<DecodeIQ1_M>{}), true;
    case DType::kTQ1_0:
      return launch(Factored<DecodeTQ1_0>{}), true;
    case DType::kTQ2_0:
      return launch(Factored<DecodeTQ2_0>{}), true;
    case DType::kNVFP4:
      return launch(Factored<DecodeNVFP4>{}), true;
    default:
      return with_decoder(type, launch);
  }
}

}  // namespace millrace::cuda
