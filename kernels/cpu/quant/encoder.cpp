#include "kernels/cpu/quant/encoder.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "kernels/cpu/quant/encode_dispatch.h"
#include "kernels/cpu/quant/encoder_k.h"
#include "kernels/cpu/quant/encoder_levels.h"
#include "kernels/cpu/quant/fit_levels.h"
#include "kernels/cpu/quant/fit_weighted.h"
#include "kernels/quant/codec.h"

namespace millrace::quant {
namespace {

constexpr std::array kEncodable = {DType::kQ8_0,   DType::kQ6_K,   DType::kQ5_K,  DType::kQ5_1, DType::kQ5_0,
                                   DType::kQ4_K,   DType::kQ4_1,   DType::kQ4_0,  DType::kQ4_Z, DType::kMXFP4,
                                   DType::kIQ4_NL, DType::kIQ4_XS, DType::kNVFP4, DType::kQ3_K, DType::kQ2_K,
                                   DType::kF16,    DType::kBF16,   DType::kF32};

// The entry of a table, or none: f32 is copied; q4_z, q3_k, q2_k, iq4_nl, iq4_xs and nvfp4 are searched with
// weights, all alike where there are none.
std::optional<Encoding> encoding_of(DType type) {
  switch (type) {
    case DType::kF16:
      return Encoding::kF16;
    case DType::kBF16:
      return Encoding::kBF16;
    case DType::kQ8_0:
      return Encoding::kQ8_0;
    case DType::kQ4_0:
      return Encoding::kQ4_0;
    case DType::kQ5_0:
      return Encoding::kQ5_0;
    case DType::kQ4_1:
      return Encoding::kQ4_1;
    case DType::kQ5_1:
      return Encoding::kQ5_1;
    case DType::kMXFP4:
      return Encoding::kMXFP4;
    case DType::kQ4_K:
      return Encoding::kQ4_K;
    case DType::kQ5_K:
      return Encoding::kQ5_K;
    case DType::kQ6_K:
      return Encoding::kQ6_K;
    default:
      return std::nullopt;
  }
}

// Types that have nothing to weigh.
bool weighs_nothing(DType type) {
  return type == DType::kF16 || type == DType::kBF16 || type == DType::kQ8_0;
}

// ---------------------------------------------------------------- searched with weights, four blocks at a
// time

// Four blocks with their weights, element by element.
struct FourBlocks {
  Float4 x[kBlock], w[kBlock];
  Float4 codes[kBlock];  // 0 .. 15 or 31, as floats
};

// Element j's two halves of a nibble group, and its fifth bit, for the block in `lane`.
template <class Block>
void pack(const FourBlocks& four, int lane, Block& b) {
  uint8_t codes[kBlock];
  for (int j = 0; j < kBlock; ++j) codes[j] = static_cast<uint8_t>(four.codes[j][lane]);
  for (int j = 0; j < 16; ++j) b.q[j] = static_cast<uint8_t>((codes[j] & 15) | (codes[j + 16] & 15) << 4);
  if constexpr (requires { b.high; }) {
    std::memset(b.high, 0, sizeof b.high);
    for (int j = 0; j < kBlock; ++j) b.high[j / 8] |= static_cast<uint8_t>((codes[j] >> 4 & 1) << (j % 8));
  }
}

// Float4 of f16 numbers: stored bits and the value they stand for.
struct StoredLanes {
  uint16_t bits[kFloat4Lanes];
  Float4 value;
  explicit StoredLanes(Float4 wanted) {
    for (int l = 0; l < kFloat4Lanes; ++l) {
      bits[l] = stored_half(wanted[l]);
      value[l] = half_value(bits[l]);
    }
  }
};

template <class Block>
void encode_around_zero(FourBlocks& four, float half, Block* out) {
  const StoredLanes d(fit_signed<kBlock>(four.x, four.w, half));
  const Float4 inverse = divide_or_zero(all4(1.0f), d.value);
  for (int j = 0; j < kBlock; ++j) {
    four.codes[j] = clamp4(round4(four.x[j] * inverse), -half, half - 1.0f) + all4(half);
  }
  for (int l = 0; l < kFloat4Lanes; ++l) {
    out[l].d = d.bits[l];
    pack(four, l, out[l]);
  }
}

void encode_iq4_nl(FourBlocks& four, BlockIQ4_NL* out) {
  const StoredLanes d(fit_iq4<kBlock>(four.x, four.w));
  const Float4 inverse = divide_or_zero(all4(1.0f), d.value);
  for (int j = 0; j < kBlock; ++j) {
    const Float4 level = kIQ4.nearest(four.x[j] * inverse);
    for (int l = 0; l < kFloat4Lanes; ++l) four.codes[j][l] = static_cast<float>(kIQ4.code_of(level[l]));
  }
  for (int l = 0; l < kFloat4Lanes; ++l) {
    out[l].d = d.bits[l];
    pack(four, l, out[l]);
  }
}

template <class Block>
void encode_above_min(FourBlocks& four, float top, Block* out) {
  const ScaleMin fit = fit_above_min<kBlock>(four.x, four.w, top, /*below_zero=*/false);
  const StoredLanes d(fit.scale), m(fit.min);
  const Float4 inverse = divide_or_zero(all4(1.0f), d.value);
  for (int j = 0; j < kBlock; ++j) {
    four.codes[j] = clamp4(round4((four.x[j] - m.value) * inverse), 0.0f, top);
  }
  for (int l = 0; l < kFloat4Lanes; ++l) {
    out[l].d = d.bits[l];
    out[l].m = m.bits[l];
    pack(four, l, out[l]);
  }
}

// The scales Q4_Z can hold on either side of the one wanted, and with each some zero points around the one
// wanted: the pair whose codes err least.
void encode_zero_point(FourBlocks& four, BlockQ4_Z* out) {
  constexpr float kTop = 15.0f, kMostEighths = 127.0f;
  const ScaleMin fit = fit_above_min<kBlock>(four.x, four.w, kTop, /*below_zero=*/true);
  const Int4 bias = Int4{} + static_cast<int32_t>(kQ4ZScaleBias);
  const Int4 below = (reinterpret_cast<Int4>(fit.scale) - bias) >> 19;
  Int4 best_bits = {};
  Float4 best_error = all4(INFINITY), best_zero = all4(0.0f);
  for (int up = 0; up <= 1; ++up) {
    Int4 bits = below + up;
    bits = bits < 0 ? Int4{} : bits;
    bits = bits > 511 ? Int4{} + 511 : bits;
    const Float4 d = reinterpret_cast<Float4>((bits << 19) + bias), inverse = all4(1.0f) / d;
    const Float4 wanted = round4(clamp4(all4(-8.0f) * fit.min * inverse, 0.0f, kMostEighths));
    for (int off = -2; off <= 2; ++off) {
      const Float4 eighths = clamp4(wanted + all4(static_cast<float>(off)), 0.0f, kMostEighths);
      const Float4 zero = all4(0.125f) * eighths;
      Float4 error = all4(0.0f);
      for (int j = 0; j < kBlock; ++j) {
        const Float4 y = four.x[j] * inverse + zero;
        const Float4 miss = y - clamp4(round4(clamp4(y, -1.0f, 16.0f)), 0.0f, kTop);
        error += four.w[j] * miss * miss;
      }
      error *= d * d;
      const Int4 better = error < best_error;
      best_error = select(better, error, best_error);
      best_zero = select(better, eighths, best_zero);
      best_bits = (better & bits) | (~better & best_bits);
    }
  }
  const Float4 inverse = all4(1.0f) / reinterpret_cast<Float4>((best_bits << 19) + bias);
  for (int j = 0; j < kBlock; ++j) {
    const Float4 y = clamp4(four.x[j] * inverse + all4(0.125f) * best_zero, -1.0f, 16.0f);
    four.codes[j] = clamp4(round4(y), 0.0f, kTop);
  }
  for (int l = 0; l < kFloat4Lanes; ++l) {
    out[l].dz = static_cast<uint16_t>(best_bits[l] << 7 | static_cast<int32_t>(best_zero[l]));
    pack(four, l, out[l]);
  }
}

// |y| to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (ties to the even code): its code, and its value.
void round_e2m1(Float4 y, Float4& code, Float4& value) {
  const Int4 below2 = y < all4(2.0f), below4 = y < all4(4.0f);
  const Float4 fine = round4(y + y), middle = round4(y);
  const Float4 coarse = min4(round4(y * all4(0.5f)), all4(3.0f));
  code = select(below2, fine, select(below4, middle + all4(2.0f), coarse + all4(4.0f)));
  value = select(below2, fine * all4(0.5f), select(below4, middle, coarse + coarse));
}

// The exponent that lets the extreme value in (its own, less the 2 of e2m1's largest), and its neighbours:
// one lower saturates the extremes and is finer for the rest, one higher rounds the extremes better.
void encode_mxfp4(FourBlocks& four, BlockMXFP4* out) {
  Float4 highest = all4(0.0f);
  for (int j = 0; j < kBlock; ++j) highest = max4(highest, abs4(four.x[j]));
  Int4 exponent = reinterpret_cast<Int4>(highest) >> 23;  // biased by 127; highest >= 0
  exponent -= 2;
  Int4 best_exponent = {};
  Float4 best_error = all4(INFINITY), codes[kBlock];
  for (int step = -1; step <= 1; ++step) {
    Int4 e = exponent + step;
    e = e < 1 ? Int4{} + 1 : e;  // 2^-126, the least a float32 holds without going subnormal
    const Float4 scale = reinterpret_cast<Float4>(e << 23);
    const Float4 inverse = all4(1.0f) / scale;
    Float4 error = all4(0.0f);
    for (int j = 0; j < kBlock; ++j) {
      Float4 value;
      const Float4 y = min4(abs4(four.x[j]) * inverse, all4(8.0f));
      round_e2m1(y, codes[j], value);
      const Float4 off = abs4(four.x[j]) - scale * value;
      error += four.w[j] * off * off;
    }
    const Int4 better = error < best_error;
    best_error = select(better, error, best_error);
    best_exponent = (better & e) | (~better & best_exponent);
    for (int j = 0; j < kBlock; ++j) {
      const Int4 minus = (four.x[j] < all4(0.0f)) & (codes[j] > all4(0.0f));
      const Float4 with_sign = codes[j] + select(minus, all4(8.0f), all4(0.0f));
      four.codes[j] = select(better, with_sign, four.codes[j]);
    }
  }
  for (int l = 0; l < kFloat4Lanes; ++l) {
    out[l].e = static_cast<uint8_t>(best_exponent[l]);
    pack(four, l, out[l]);
  }
}

// Hands four blocks at a time to `encode`, the last ones filled up with zeros.
template <class Block>
void encode_by_fours(const float* x, int64_t num_rows, int64_t cols, const float* importance, std::byte* out,
                     void (*encode)(FourBlocks&, Block*)) {
  const int64_t per_row = cols / kBlock, blocks = num_rows * per_row;
  FourBlocks four = {};
  for (Float4& w : four.w) w = all4(1.0f);
  for (int64_t begin = 0; begin < blocks; begin += kFloat4Lanes) {
    const int64_t count = std::min<int64_t>(kFloat4Lanes, blocks - begin);
    if (count == kFloat4Lanes) {
      transpose_in(x + begin * kBlock, kBlock, four.x);
    } else {
      for (int j = 0; j < kBlock; ++j) {
        four.x[j] = all4(0.0f);
        for (int l = 0; l < count; ++l) four.x[j][l] = x[(begin + l) * kBlock + j];
      }
    }
    for (int l = 0; importance != nullptr && l < count; ++l) {
      const float* w = importance + (begin + l) % per_row * kBlock;
      for (int j = 0; j < kBlock; ++j) four.w[j][l] = w[j];
    }
    Block block[kFloat4Lanes];
    encode(four, block);
    std::memcpy(out + begin * static_cast<int64_t>(sizeof(Block)), block,
                static_cast<size_t>(count) * sizeof(Block));
  }
}

template <class Block, class Encode>
void encode_each(int64_t blocks, int elements, const float* x, const float* importance, int64_t per_row,
                 std::byte* out, Encode&& encode) {
  for (int64_t i = 0; i < blocks; ++i) {
    Block block;
    encode(BlockRun{x + i * elements, importance == nullptr ? nullptr : importance + i % per_row * elements},
           block);
    std::memcpy(out + i * static_cast<int64_t>(sizeof(Block)), &block, sizeof block);
  }
}

}  // namespace

std::span<const DType> encodable_types() { return kEncodable; }

bool can_encode(DType type) {
  return std::find(kEncodable.begin(), kEncodable.end(), type) != kEncodable.end();
}

std::optional<EncodeError> encode_alike(DType type, const float* x, int64_t count, std::byte* out) {
  const std::optional<Encoding> encoding = encoding_of(type);
  if (!encoding) return std::nullopt;
  // Sums of squares are float within a piece.
  constexpr int64_t kPiece = 4096;
  const EncodeFn encode = best_encoders().encode[static_cast<int>(*encoding)];
  EncodeError sum;
  for (int64_t done = 0; done < count; done += kPiece) {
    const EncodeSums piece = encode(x + done, std::min(kPiece, count - done) / info(type).block_elements,
                                    reinterpret_cast<uint8_t*>(out) + bytes_of(type, done));
    sum.error += piece.error;
    sum.total += piece.total;
  }
  return sum;
}

void encode_rows(DType type, const float* x, int64_t num_rows, int64_t cols, const float* importance,
                 std::byte* out) {
  const int64_t count = num_rows * cols;
  if ((importance == nullptr || weighs_nothing(type)) && encode_alike(type, x, count, out)) return;
  const auto by_fours = [&]<class Block>(void (*encode)(FourBlocks&, Block*)) {
    encode_by_fours(x, num_rows, cols, importance, out, encode);
  };
  const auto by_super_blocks = [&]<class Block>(void (*encode)(const BlockRun&, Block&)) {
    encode_each<Block>(count / kSuperBlock, kSuperBlock, x, importance, cols / kSuperBlock, out, encode);
  };
  using Four = FourBlocks&;
  switch (type) {
    case DType::kF32:
      std::memcpy(out, x, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kQ4_0:
      return by_fours(+[](Four f, BlockQ4_0* b) { encode_around_zero(f, 8.0f, b); });
    case DType::kQ5_0:
      return by_fours(+[](Four f, BlockQ5_0* b) { encode_around_zero(f, 16.0f, b); });
    case DType::kQ4_1:
      return by_fours(+[](Four f, BlockQ4_1* b) { encode_above_min(f, 15.0f, b); });
    case DType::kQ5_1:
      return by_fours(+[](Four f, BlockQ5_1* b) { encode_above_min(f, 31.0f, b); });
    case DType::kQ4_Z:
      return by_fours(+[](Four f, BlockQ4_Z* b) { encode_zero_point(f, b); });
    case DType::kMXFP4:
      return by_fours(+[](Four f, BlockMXFP4* b) { encode_mxfp4(f, b); });
    case DType::kQ4_K:
      return by_super_blocks(encode_q4_k);
    case DType::kQ5_K:
      return by_super_blocks(encode_q5_k);
    case DType::kQ6_K:
      return by_super_blocks(encode_q6_k);
    case DType::kQ2_K:
      return by_super_blocks(encode_q2_k);
    case DType::kQ3_K:
      return by_super_blocks(encode_q3_k);
    case DType::kIQ4_XS:
      return by_super_blocks(encode_iq4_xs);
    case DType::kIQ4_NL:
      return by_fours(+[](Four f, BlockIQ4_NL* b) { encode_iq4_nl(f, b); });
    case DType::kNVFP4:
      return encode_each<BlockNVFP4>(count / kNvBlock, kNvBlock, x, importance, cols / kNvBlock, out,
                                     encode_nvfp4);
    default:
      throw_error(ErrorCode::kUnsupported, "cannot quantize to {}", info(type).name);
  }
}

bool widen(DType type, const std::byte* x, int64_t count, float* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(x);
  if (type == DType::kF16) return best_encoders().widen_f16(bytes, count, out);
  if (type == DType::kBF16) return best_encoders().widen_bf16(bytes, count, out);
  dequantize(type, x, out, count);
  return all_finite(out, count);
}

bool all_finite(const float* x, int64_t count) {
  uint32_t highest = 0;
  for (int64_t i = 0; i < count; ++i)
    highest = std::max(highest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return highest < 0x7f800000u;
}

}  // namespace millrace::quant
