#include "kernels/quant/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "base/float_bits.h"
#include "kernels/quant/blocks.h"
#include "kernels/quant/low_bits.h"

namespace millrace::quant {
namespace {

float half(uint16_t bits) { return to_float(Half{bits}); }

// Element j of a nibble group: bytes j hold elements j and j + 16.
int nibble(const uint8_t* q, int j) { return j < 16 ? q[j] & 15 : q[j - 16] >> 4; }
int fifth_bit(const uint8_t* high, int j) { return (high[j / 8] >> (j % 8)) & 1; }

// ---------------------------------------------------------------- one block to float32

void decode(const BlockQ8_0& b, float* out) {
  for (int j = 0; j < kBlock; ++j) out[j] = half(b.d) * static_cast<float>(b.q[j]);
}

void decode(const BlockQ4_0& b, float* out) {
  for (int j = 0; j < kBlock; ++j) out[j] = half(b.d) * static_cast<float>(nibble(b.q, j) - 8);
}

void decode(const BlockQ4_1& b, float* out) {
  for (int j = 0; j < kBlock; ++j) out[j] = half(b.d) * static_cast<float>(nibble(b.q, j)) + half(b.m);
}

void decode(const BlockQ4_Z& b, float* out) {
  const float d = std::bit_cast<float>(q4_z_scale_bits(b.dz)), m = d * q4_z_min(b.dz);
  for (int j = 0; j < kBlock; ++j) out[j] = d * static_cast<float>(nibble(b.q, j)) + m;
}

void decode(const BlockQ5_0& b, float* out) {
  for (int j = 0; j < kBlock; ++j) {
    const int q = nibble(b.q, j) | fifth_bit(b.high, j) << 4;
    out[j] = half(b.d) * static_cast<float>(q - 16);
  }
}

void decode(const BlockQ5_1& b, float* out) {
  for (int j = 0; j < kBlock; ++j) {
    const int q = nibble(b.q, j) | fifth_bit(b.high, j) << 4;
    out[j] = half(b.d) * static_cast<float>(q) + half(b.m);
  }
}

void decode(const BlockQ4_K& b, float* out) {
  for (int s = 0; s < 8; ++s) {
    uint8_t scale, min;
    scale_min_k4(b.scales, s, &scale, &min);
    const float d = half(b.d) * static_cast<float>(scale), m = half(b.dmin) * static_cast<float>(min);
    for (int i = 0; i < 32; ++i) {
      const int q = (b.q[32 * (s / 2) + i] >> (4 * (s & 1))) & 15;
      out[32 * s + i] = d * static_cast<float>(q) - m;
    }
  }
}

void decode(const BlockQ5_K& b, float* out) {
  for (int s = 0; s < 8; ++s) {
    uint8_t scale, min;
    scale_min_k4(b.scales, s, &scale, &min);
    const float d = half(b.d) * static_cast<float>(scale), m = half(b.dmin) * static_cast<float>(min);
    for (int i = 0; i < 32; ++i) {
      const int low = (b.q[32 * (s / 2) + i] >> (4 * (s & 1))) & 15;
      const int q = low | ((b.high[i] >> s) & 1) << 4;
      out[32 * s + i] = d * static_cast<float>(q) - m;
    }
  }
}

void decode(const BlockQ6_K& b, float* out) {
  for (int e = 0; e < kSuperBlock; ++e) {
    const int h = e / 128, r = e / 32 % 4, i = e % 32;
    const int low = (b.low[64 * h + 32 * (r & 1) + i] >> (4 * (r >> 1))) & 15;
    const int q = low | ((b.high[32 * h + i] >> (2 * r)) & 3) << 4;
    out[e] = half(b.d) * static_cast<float>(b.scales[e / 16]) * static_cast<float>(q - 32);
  }
}

float e2m1(int code) { return 0.5f * static_cast<float>(kE2M1Doubled[code]); }

void decode(const BlockMXFP4& b, float* out) {
  const float scale = to_float(E8M0{b.e});
  for (int j = 0; j < kBlock; ++j) out[j] = scale * e2m1(nibble(b.q, j));
}

template <class Block>
void decode_all(const std::byte* source, float* out, int64_t elements, int block_elements) {
  for (int64_t done = 0; done < elements; done += block_elements, source += sizeof(Block)) {
    Block block;
    std::memcpy(&block, source, sizeof block);
    decode(block, out + done);
  }
}

template <class Bits>
void widen_all(const std::byte* source, float* out, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    Bits bits;
    std::memcpy(&bits, source + i * sizeof bits, sizeof bits);
    out[i] = to_float(bits);
  }
}

// ---------------------------------------------------------------- float32 to one block

// An f16 scale. What f16 cannot hold saturates, so that a stored scale is always finite.
uint16_t half_scale(float d) { return to_half(std::clamp(d, -65504.0f, 65504.0f)).bits; }

// x / d to the nearest integer of [low, high]; 0 for NaN.
int nearest(float x, float d, int low, int high) {
  if (d == 0.0f || std::isnan(x)) return std::clamp(0, low, high);
  return static_cast<int>(
      std::nearbyint(std::clamp(x / d, static_cast<float>(low), static_cast<float>(high))));
}

// The element of largest magnitude, with its sign. NaN counts as nothing.
float extreme(const float* x) {
  float found = 0.0f;
  for (int j = 0; j < kBlock; ++j) {
    if (std::fabs(x[j]) > std::fabs(found)) found = x[j];
  }
  return found;
}

void encode(const float* x, BlockQ8_0& b) {
  b.d = half_scale(std::fabs(extreme(x)) / 127.0f);
  for (int j = 0; j < kBlock; ++j) b.q[j] = static_cast<int8_t>(nearest(x[j], half(b.d), -127, 127));
}

// Signed codes of Q4_0 and Q5_0 (bits 4 and 5): the extreme element gets the one code without a counterpart.
template <class Block>
void codes_around_zero(const float* x, Block& b, int bits, uint8_t* codes) {
  const int half_range = 1 << (bits - 1);
  b.d = half_scale(extreme(x) / static_cast<float>(-half_range));
  for (int j = 0; j < kBlock; ++j) {
    codes[j] = static_cast<uint8_t>(nearest(x[j], half(b.d), -half_range, half_range - 1) + half_range);
  }
}

// Unsigned codes above a minimum, of Q4_1 and Q5_1.
template <class Block>
void codes_above_min(const float* x, Block& b, int bits, uint8_t* codes) {
  const int top = (1 << bits) - 1;
  float low = INFINITY, high = -INFINITY;
  for (int j = 0; j < kBlock; ++j) {
    if (x[j] < low) low = x[j];
    if (x[j] > high) high = x[j];
  }
  if (low > high) low = high = 0.0f;  // all NaN
  b.m = half_scale(low);
  b.d = half_scale((high - half(b.m)) / static_cast<float>(top));
  for (int j = 0; j < kBlock; ++j) {
    codes[j] = static_cast<uint8_t>(nearest(x[j] - half(b.m), half(b.d), 0, top));
  }
}

void pack_nibbles(const uint8_t* codes, uint8_t* q) {
  for (int j = 0; j < 16; ++j) q[j] = static_cast<uint8_t>((codes[j] & 15) | (codes[j + 16] & 15) << 4);
}

void pack_fifth_bits(const uint8_t* codes, uint8_t* high) {
  std::memset(high, 0, 4);
  for (int j = 0; j < kBlock; ++j) high[j / 8] |= static_cast<uint8_t>((codes[j] >> 4 & 1) << (j % 8));
}

void encode(const float* x, BlockQ4_0& b) {
  uint8_t codes[kBlock];
  codes_around_zero(x, b, 4, codes);
  pack_nibbles(codes, b.q);
}

void encode(const float* x, BlockQ4_1& b) {
  uint8_t codes[kBlock];
  codes_above_min(x, b, 4, codes);
  pack_nibbles(codes, b.q);
}

// The step that spans the block's ends and zero, rounded up so that it still does; the zero point to its
// nearest.
void encode(const float* x, BlockQ4_Z& b) {
  float low = 0.0f, high = 0.0f;
  for (int j = 0; j < kBlock; ++j) {
    low = std::min(low, x[j]);
    high = std::max(high, x[j]);
  }
  const uint32_t step = std::bit_cast<uint32_t>((high - low) / 15.0f);
  const uint32_t bits = step <= kQ4ZScaleBias ? 0 : std::min((step - kQ4ZScaleBias + 0x7ffffu) >> 19, 511u);
  const float d = std::bit_cast<float>(q4_z_scale_bits(static_cast<uint16_t>(bits << 7)));
  b.dz = static_cast<uint16_t>(bits << 7 | static_cast<uint32_t>(nearest(-low, 0.125f * d, 0, 127)));
  uint8_t codes[kBlock];
  for (int j = 0; j < kBlock; ++j) {
    codes[j] = static_cast<uint8_t>(nearest(x[j] - d * q4_z_min(b.dz), d, 0, 15));
  }
  pack_nibbles(codes, b.q);
}

void encode(const float* x, BlockQ5_0& b) {
  uint8_t codes[kBlock];
  codes_around_zero(x, b, 5, codes);
  pack_nibbles(codes, b.q);
  pack_fifth_bits(codes, b.high);
}

void encode(const float* x, BlockQ5_1& b) {
  uint8_t codes[kBlock];
  codes_above_min(x, b, 5, codes);
  pack_nibbles(codes, b.q);
  pack_fifth_bits(codes, b.high);
}

// e2m1's largest value is 6 = 1.5 * 2^2, so the scale is two powers of two below the extreme element's own.
void encode(const float* x, BlockMXFP4& b) {
  const float amax = std::min(std::fabs(extreme(x)), 3.0e38f);
  int exponent = 0;
  std::frexp(amax, &exponent);  // amax = f * 2^exponent, f in [0.5, 1)
  b.e = amax == 0.0f ? uint8_t{0} : static_cast<uint8_t>(std::clamp(exponent - 1 - 2 + 127, 0, 254));
  const float scale = to_float(E8M0{b.e});
  uint8_t codes[kBlock];
  for (int j = 0; j < kBlock; ++j) {
    const float wanted = std::isnan(x[j]) ? 0.0f : std::fabs(x[j]);
    int best = 0;
    for (int code = 1; code < 8; ++code) {  // a tie keeps the code with an even mantissa
      const float now = std::fabs(scale * e2m1(code) - wanted),
                  before = std::fabs(scale * e2m1(best) - wanted);
      if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    codes[j] = static_cast<uint8_t>(best | (x[j] < 0.0f && best != 0 ? 8 : 0));
  }
  pack_nibbles(codes, b.q);
}

// The level nearest to x / d among the 16 of a table; NaN counts as zero.
template <class Level>
uint8_t nearest_level(float x, float d, const Level* levels) {
  const float wanted = std::isnan(x) ? 0.0f : x;
  int best = 0;
  for (int code = 1; code < 16; ++code) {
    if (std::fabs(d * static_cast<float>(levels[code]) - wanted) <
        std::fabs(d * static_cast<float>(levels[best]) - wanted)) {
      best = code;
    }
  }
  return static_cast<uint8_t>(best);
}

void encode(const float* x, BlockIQ4_NL& b) {
  b.d = half_scale(extreme(x) / static_cast<float>(kIQ4Levels[0]));
  uint8_t codes[kBlock];
  for (int j = 0; j < kBlock; ++j) codes[j] = nearest_level(x[j], half(b.d), kIQ4Levels);
  pack_nibbles(codes, b.q);
}

// The scale nearest to a sixth of the extreme element, for 6 is e2m1's largest value.
void encode(const float* x, BlockNVFP4& b) {
  for (int s = 0; s < 4; ++s, x += 16) {
    float amax = 0.0f;
    for (int j = 0; j < 16; ++j) amax = std::max(amax, std::fabs(x[j]));
    const float wanted = std::min(amax / 6.0f, 448.0f) * 512.0f;
    int best = 0;
    const auto off = [&](int code) {
      return std::fabs(static_cast<float>(ue4m3_units(static_cast<uint8_t>(code))) - wanted);
    };
    for (int code = 1; code < 0x7f; ++code) {
      if (off(code) < off(best)) best = code;
    }
    b.scales[s] = static_cast<uint8_t>(best);
    const float unit = 0x1p-10f * static_cast<float>(ue4m3_units(b.scales[s]));
    for (int j = 0; j < 8; ++j) {
      b.q[8 * s + j] = static_cast<uint8_t>(nearest_level(x[j], unit, kE2M1Doubled) |
                                            nearest_level(x[j + 8], unit, kE2M1Doubled) << 4);
    }
  }
}

template <class Block, int kElements = kBlock>
void encode_all(const float* source, std::byte* out, int64_t elements) {
  for (int64_t done = 0; done < elements; done += kElements, out += sizeof(Block)) {
    Block block;
    encode(source + done, block);
    std::memcpy(out, &block, sizeof block);
  }
}

// ---------------------------------------------------------------- scales beside the values

float grid_scale(const ScaleGrid& grid, int64_t row, int64_t col) {
  const int64_t at =
      (grid.first_row + row) / grid.rows_per_scale * grid.scales_per_row + col / grid.cols_per_scale;
  if (grid.type == DType::kU8) return to_float(E8M0{static_cast<uint8_t>(grid.data[at])});
  if (grid.type == DType::kBF16) {
    BFloat16 scale;
    std::memcpy(&scale, grid.data + at * sizeof scale, sizeof scale);
    return to_float(scale);
  }
  MILLRACE_CHECK(grid.type == DType::kF32);
  float scale;
  std::memcpy(&scale, grid.data + at * sizeof scale, sizeof scale);
  return scale;
}

bool is_finite_half(uint16_t bits) { return (bits & 0x7c00u) != 0x7c00u; }

// `bytes_per_block` blocks with f16 numbers at the given offsets.
bool halves_are_finite(const TensorView& view, int64_t row, std::initializer_list<size_t> offsets) {
  const DTypeInfo& type = info(view.type);
  const std::byte* block = view.row(row);
  for (int64_t done = 0; done < view.cols(); done += type.block_elements, block += type.block_bytes) {
    for (size_t offset : offsets) {
      uint16_t bits;
      std::memcpy(&bits, block + offset, sizeof bits);
      if (!is_finite_half(bits)) return false;
    }
  }
  return true;
}

}  // namespace

void dequantize(DType type, const std::byte* source, float* out, int64_t elements) {
  switch (type) {
    case DType::kF32:
      std::memcpy(out, source, static_cast<size_t>(elements) * sizeof(float));
      return;
    case DType::kF16:
      widen_all<Half>(source, out, elements);
      return;
    case DType::kBF16:
      widen_all<BFloat16>(source, out, elements);
      return;
    case DType::kQ8_0:
      decode_all<BlockQ8_0>(source, out, elements, kBlock);
      return;
    case DType::kQ4_0:
      decode_all<BlockQ4_0>(source, out, elements, kBlock);
      return;
    case DType::kQ4_1:
      decode_all<BlockQ4_1>(source, out, elements, kBlock);
      return;
    case DType::kQ5_0:
      decode_all<BlockQ5_0>(source, out, elements, kBlock);
      return;
    case DType::kQ5_1:
      decode_all<BlockQ5_1>(source, out, elements, kBlock);
      return;
    case DType::kQ4_Z:
      decode_all<BlockQ4_Z>(source, out, elements, kBlock);
      return;
    case DType::kQ4_K:
      decode_all<BlockQ4_K>(source, out, elements, kSuperBlock);
      return;
    case DType::kQ5_K:
      decode_all<BlockQ5_K>(source, out, elements, kSuperBlock);
      return;
    case DType::kQ6_K:
      decode_all<BlockQ6_K>(source, out, elements, kSuperBlock);
      return;
    case DType::kMXFP4:
      decode_all<BlockMXFP4>(source, out, elements, kBlock);
      return;
    case DType::kQ2_K:
      decode_all<BlockQ2_K>(source, out, elements, kSuperBlock);
      return;
    case DType::kQ3_K:
      decode_all<BlockQ3_K>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ4_NL:
      decode_all<BlockIQ4_NL>(source, out, elements, kBlock);
      return;
    case DType::kIQ4_XS:
      decode_all<BlockIQ4_XS>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ3_XXS:
      decode_all<BlockIQ3_XXS>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ3_S:
      decode_all<BlockIQ3_S>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ2_XXS:
      decode_all<BlockIQ2_XXS>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ2_XS:
      decode_all<BlockIQ2_XS>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ2_S:
      decode_all<BlockIQ2_S>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ1_S:
      decode_all<BlockIQ1_S>(source, out, elements, kSuperBlock);
      return;
    case DType::kIQ1_M:
      decode_all<BlockIQ1_M>(source, out, elements, kSuperBlock);
      return;
    case DType::kTQ1_0:
      decode_all<BlockTQ1_0>(source, out, elements, kSuperBlock);
      return;
    case DType::kTQ2_0:
      decode_all<BlockTQ2_0>(source, out, elements, kSuperBlock);
      return;
    case DType::kNVFP4:
      decode_all<BlockNVFP4>(source, out, elements, kNvBlock);
      return;
    case DType::kF8E4M3:
    case DType::kMXFP4Split:
    case DType::kI32:
    case DType::kU8:
      break;
  }
  throw_error(ErrorCode::kUnsupported, "{} values cannot be dequantized without their tensor",
              info(type).name);
}

void dequantize_row(const TensorView& view, int64_t row, float* out) {
  const int64_t cols = view.cols();
  const auto* bytes = reinterpret_cast<const uint8_t*>(view.row(row));
  if (view.type == DType::kMXFP4Split || view.type == DType::kF8E4M3) {
    // One run of columns per scale.
    const bool scaled = view.scales.data != nullptr;
    const int64_t step = scaled ? std::max<int64_t>(1, view.scales.cols_per_scale) : cols;
    for (int64_t begin = 0; begin < cols; begin += step) {
      const float scale = scaled ? grid_scale(view.scales, view.data_row(row), begin) : 1.0f;
      for (int64_t c = begin; c < std::min(begin + step, cols); ++c) {
        out[c] = scale * (view.type == DType::kF8E4M3 ? to_float(Fp8E4M3{bytes[c]})
                                                      : e2m1((bytes[c / 2] >> (c % 2 * 4)) & 15));
      }
    }
  } else {
    dequantize(view.type, view.row(row), out, cols);
    if (view.scales.data == nullptr) return;
    for (int64_t c = 0; c < cols; ++c) out[c] *= grid_scale(view.scales, view.data_row(row), c);
  }
}

void quantize(DType type, const float* source, std::byte* out, int64_t elements) {
  switch (type) {
    case DType::kF32:
      std::memcpy(out, source, static_cast<size_t>(elements) * sizeof(float));
      return;
    case DType::kF16:
      for (int64_t i = 0; i < elements; ++i) {
        const Half bits = to_half(source[i]);
        std::memcpy(out + i * sizeof bits, &bits, sizeof bits);
      }
      return;
    case DType::kBF16:
      for (int64_t i = 0; i < elements; ++i) {
        const BFloat16 bits = to_bfloat16(source[i]);
        std::memcpy(out + i * sizeof bits, &bits, sizeof bits);
      }
      return;
    case DType::kQ8_0:
      encode_all<BlockQ8_0>(source, out, elements);
      return;
    case DType::kQ4_0:
      encode_all<BlockQ4_0>(source, out, elements);
      return;
    case DType::kQ4_1:
      encode_all<BlockQ4_1>(source, out, elements);
      return;
    case DType::kQ5_0:
      encode_all<BlockQ5_0>(source, out, elements);
      return;
    case DType::kQ5_1:
      encode_all<BlockQ5_1>(source, out, elements);
      return;
    case DType::kMXFP4:
      encode_all<BlockMXFP4>(source, out, elements);
      return;
    case DType::kQ4_Z:
      encode_all<BlockQ4_Z>(source, out, elements);
      return;
    case DType::kIQ4_NL:
      encode_all<BlockIQ4_NL>(source, out, elements);
      return;
    case DType::kNVFP4:
      encode_all<BlockNVFP4, kNvBlock>(source, out, elements);
      return;
    default:
      throw_error(ErrorCode::kUnsupported, "cannot quantize to {}", info(type).name);
  }
}

bool scales_are_finite(const TensorView& view, int64_t row) {
  switch (view.type) {
    case DType::kQ8_0:
    case DType::kQ4_0:
    case DType::kQ5_0:
    case DType::kIQ4_NL:
    case DType::kIQ4_XS:
    case DType::kIQ3_XXS:
    case DType::kIQ3_S:
    case DType::kIQ2_XXS:
    case DType::kIQ2_XS:
    case DType::kIQ2_S:
    case DType::kIQ1_S:
      return halves_are_finite(view, row, {0});
    case DType::kQ2_K:
      return halves_are_finite(view, row, {offsetof(BlockQ2_K, d), offsetof(BlockQ2_K, dmin)});
    case DType::kQ3_K:
      return halves_are_finite(view, row, {offsetof(BlockQ3_K, d)});
    case DType::kTQ1_0:
      return halves_are_finite(view, row, {offsetof(BlockTQ1_0, d)});
    case DType::kTQ2_0:
      return halves_are_finite(view, row, {offsetof(BlockTQ2_0, d)});
    case DType::kIQ1_M: {
      const std::byte* at = view.row(row);
      for (int64_t done = 0; done < view.cols(); done += kSuperBlock, at += sizeof(BlockIQ1_M)) {
        BlockIQ1_M block;
        std::memcpy(&block, at, sizeof block);
        if (!is_finite_half(scale_bits(block))) return false;
      }
      return true;
    }
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return halves_are_finite(view, row, {0, 2});
    case DType::kQ6_K:
      return halves_are_finite(view, row, {offsetof(BlockQ6_K, d)});
    case DType::kMXFP4: {
      const std::byte* block = view.row(row);
      for (int64_t done = 0; done < view.cols(); done += kBlock, block += sizeof(BlockMXFP4)) {
        if (*block == std::byte{255}) return false;
      }
      return true;
    }
    case DType::kMXFP4Split:
    case DType::kF8E4M3:
      if (view.scales.data == nullptr) return true;
      for (int64_t c = 0; c < view.cols(); c += view.scales.cols_per_scale) {
        if (!std::isfinite(grid_scale(view.scales, view.data_row(row), c))) return false;
      }
      return true;
    default:
      return true;
  }
}

}  // namespace millrace::quant
