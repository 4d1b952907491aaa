// The codecs against blocks decoded by an independent implementation (tests/golden/blocks.*), and the way
// there and back against the step of each type.
#include "kernels/quant/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/float_bits.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant {
namespace {

std::string read_all(const char* path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

TensorView one_row(DType type, const void* data, int64_t cols) {
  TensorView view;
  view.type = type;
  view.rank = 2;
  view.shape = {1, cols, 1, 1};
  view.data = static_cast<const std::byte*>(data);
  return view;
}

// Equal bits, so that +0 and -0 differ and a NaN equals itself.
void expect_same_bits(float got, float want, const std::string& type, size_t at) {
  uint32_t g, w;
  std::memcpy(&g, &got, 4);
  std::memcpy(&w, &want, 4);
  // The sign of a zero is not part of the formats' definition (gguf-py keeps d * -0 where integers drop it).
  if (got == 0.0f && want == 0.0f) return;
  ASSERT_EQ(g, w) << type << " element " << at << ": got " << got << ", expected " << want;
}

TEST(Codec, DecodesGoldenBlocksToTheBit) {
  const auto entries = nlohmann::json::parse(read_all("tests/golden/blocks.json"));
  const std::string bin = read_all("tests/golden/blocks.bin");
  ASSERT_GE(entries.size(), 27u);
  for (const auto& entry : entries) {
    const std::string name = entry["type"];
    const auto type = parse_dtype(name);
    ASSERT_TRUE(type.has_value()) << name;
    const size_t count = entry["values_count"];
    TensorView view =
        one_row(*type, bin.data() + entry["raw_offset"].get<size_t>(), static_cast<int64_t>(count));
    ASSERT_EQ(view.bytes(), entry["raw_bytes"].get<size_t>()) << name;
    if (entry.contains("scales_offset")) {
      view.scales.data =
          reinterpret_cast<const std::byte*>(bin.data() + entry["scales_offset"].get<size_t>());
      view.scales.scales_per_row = static_cast<int64_t>(count / 32);
    }
    std::vector<float> want(count), got(count, -1.0f);
    std::memcpy(want.data(), bin.data() + entry["values_offset"].get<size_t>(), count * sizeof(float));
    dequantize_row(view, 0, got.data());
    for (size_t i = 0; i < count; ++i) expect_same_bits(got[i], want[i], name, i);
    EXPECT_TRUE(scales_are_finite(view, 0)) << name;
  }
}

// Largest |x - decode(encode(x))| a block may show, as a fraction of its largest magnitude: half a step, and
// what rounding the f16 scale (2^-11) adds at the far end of the range.
double allowed(DType type) {
  switch (type) {
    case DType::kF32:
      return 0;
    case DType::kF16:
      return 0x1p-11;
    case DType::kBF16:
      return 0x1p-8;
    case DType::kQ8_0:
      return 0.5 / 127 + 0x1p-11;
    case DType::kQ4_0:
      return 1.0 / 8 + 0x1p-10;  // the far side has no code 8: a whole step
    case DType::kQ4_1:
      return 0.5 * 2 / 15 + 0x1p-9;  // the range is up to twice the magnitude
    case DType::kQ4_Z:
      return (0.5 + 1.0 / 16) * 2 / 15 * (17.0 / 16) + 1e-6;  // the zero point's step and the scale's besides
    case DType::kQ5_0:
      return 1.0 / 16 + 0x1p-10;
    case DType::kQ5_1:
      return 0.5 * 2 / 31 + 0x1p-9;
    case DType::kMXFP4:
      return 0.25 + 0x1p-20;  // just below 8 * 2^e saturates at 6 * 2^e
    case DType::kIQ4_NL:
      return 14.0 / 127 + 0x1p-10;  // the far side has no level 127, but 113
    default:
      return -1;
  }
}

const DType kWritable[] = {DType::kF32,   DType::kF16,  DType::kBF16,  DType::kQ8_0,
                           DType::kQ4_0,  DType::kQ4_1, DType::kQ5_0,  DType::kQ5_1,
                           DType::kMXFP4, DType::kQ4_Z, DType::kIQ4_NL};

TEST(Codec, QuantizedValuesStayWithinAStep) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  constexpr int64_t kElements = 32 * 200;
  for (DType type : kWritable) {
    double worst = 0;
    for (float magnitude : {1.0f, 1e-3f, 300.0f}) {
      std::vector<float> x(kElements), y(kElements);
      for (float& v : x) v = magnitude * normal(random);
      std::vector<std::byte> coded(bytes_of(type, kElements));
      quantize(type, x.data(), coded.data(), kElements);
      dequantize(type, coded.data(), y.data(), kElements);
      for (int64_t b = 0; b < kElements; b += 32) {
        float amax = 0;
        for (int j = 0; j < 32; ++j) amax = std::max(amax, std::fabs(x[b + j]));
        for (int j = 0; j < 32; ++j) {
          worst = std::max(worst, static_cast<double>(std::fabs(x[b + j] - y[b + j]) / amax));
        }
      }
    }
    EXPECT_LE(worst, allowed(type)) << info(type).name;
    EXPECT_GE(worst, 0.3 * allowed(type)) << info(type).name << ": the bound is idle";
  }
}

TEST(Codec, ValuesOnTheGridSurvive) {
  for (DType type : kWritable) {
    // All codes of the 4-bit types; 0.25 * [-16, 15] for five bits and more.
    const bool four = type == DType::kQ4_0 || type == DType::kQ4_1 || type == DType::kQ4_Z;
    std::vector<float> x(32), y(32);
    for (int j = 0; j < 32; ++j) x[j] = 0.25f * static_cast<float>(four ? j % 16 - 8 : j - 16);
    if (type == DType::kMXFP4) {
      for (int j = 0; j < 32; ++j) x[j] = 0.5f * static_cast<float>(kE2M1Doubled[j % 16]);
    }
    if (type == DType::kIQ4_NL) {
      for (int j = 0; j < 32; ++j) x[j] = 0.25f * static_cast<float>(kIQ4Levels[j % 16]);
    }
    if (type == DType::kQ8_0) {
      for (int j = 0; j < 32; ++j) x[j] = 0.25f * static_cast<float>(j % 2 ? 127 - j : j - 127);
      x[0] = -0.25f * 127;
    }
    std::vector<std::byte> coded(bytes_of(type, 32));
    quantize(type, x.data(), coded.data(), 32);
    dequantize(type, coded.data(), y.data(), 32);
    for (int j = 0; j < 32; ++j) EXPECT_EQ(x[j], y[j]) << info(type).name << " " << j;
  }
}

// NVFP4 has four scales to a block, from 2^-9 to 448: values on their grids survive, and larger ones
// saturate.
TEST(Codec, KeepsNvfp4Values) {
  std::vector<float> x(64), y(64);
  const float scales[4] = {0x1p-9f, 0.015625f, 1.25f, 448.0f};
  for (int j = 0; j < 64; ++j) x[j] = scales[j / 16] * 0.5f * static_cast<float>(kE2M1Doubled[j % 16]);
  std::vector<std::byte> coded(bytes_of(DType::kNVFP4, 64));
  quantize(DType::kNVFP4, x.data(), coded.data(), 64);
  dequantize(DType::kNVFP4, coded.data(), y.data(), 64);
  EXPECT_EQ(x, y);
  x[50] = -1e6f;
  quantize(DType::kNVFP4, x.data(), coded.data(), 64);
  dequantize(DType::kNVFP4, coded.data(), y.data(), 64);
  EXPECT_EQ(y[50], -6.0f * 448.0f);
}

// A factor beside the tensor, as NVFP4 files have, and one for each expert.
TEST(Codec, MultipliesByAFactorBesideTheTensor) {
  const std::vector<float> ones(64, 1.5f);  // 6 times a scale of 1/4
  std::vector<std::byte> coded(2 * bytes_of(DType::kNVFP4, 64));
  quantize(DType::kNVFP4, ones.data(), coded.data(), 64);
  quantize(DType::kNVFP4, ones.data(), coded.data() + 36, 64);
  const float factors[2] = {0.5f, 3.0f};
  TensorView view = one_row(DType::kNVFP4, coded.data(), 64);
  view.shape[0] = 2;
  view.row_stride_bytes = 36;
  view.scales = {reinterpret_cast<const std::byte*>(factors), DType::kF32, 1, 64, 1};
  float out[64];
  for (int row = 0; row < 2; ++row) {
    dequantize_row(view, row, out);
    for (const float v : out) EXPECT_EQ(v, 1.5f * factors[row]);
  }
}

TEST(Codec, OddValuesGiveFiniteScales) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float huge = std::numeric_limits<float>::max(), tiny = std::numeric_limits<float>::denorm_min();
  for (DType type : {DType::kQ8_0, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kMXFP4}) {
    for (float odd : {inf, -inf, nan, huge, -huge, tiny, 0.0f}) {
      std::vector<float> x(32, odd), y(32);
      x[3] = 1.0f;
      std::vector<std::byte> coded(bytes_of(type, 32));
      quantize(type, x.data(), coded.data(), 32);
      EXPECT_TRUE(scales_are_finite(one_row(type, coded.data(), 32), 0)) << info(type).name << " " << odd;
      dequantize(type, coded.data(), y.data(), 32);
      if (odd == tiny || odd == 0.0f) {
        EXPECT_NEAR(y[3], 1.0f, 0.01f) << info(type).name;
      }
    }
  }
}

TEST(Codec, ScaleGridsReachTheirPatch) {
  // FP8, 5 rows of 6, patches of 2 x 4: scales [3, 2].
  std::vector<uint8_t> bytes(30, 0x38);  // 1.0
  const float scales[6] = {1, 2, 3, 4, 5, 6};
  TensorView view = one_row(DType::kF8E4M3, bytes.data(), 6);
  view.shape[0] = 5;
  view.row_stride_bytes = 6;
  view.scales = {reinterpret_cast<const std::byte*>(scales), DType::kF32, 2, 4, 2};
  float out[6];
  dequantize_row(view, 3, out);
  EXPECT_EQ(out[0], 3);
  EXPECT_EQ(out[3], 3);
  EXPECT_EQ(out[4], 4);
  dequantize_row(view, 4, out);
  EXPECT_EQ(out[5], 6);
}

TEST(Codec, NamesDamagedScales) {
  struct Case {
    DType type;
    int offset;
  };
  for (const Case c : {Case{DType::kQ8_0, 0}, Case{DType::kQ4_1, 2}, Case{DType::kQ5_0, 0},
                       Case{DType::kQ4_K, 2}, Case{DType::kQ6_K, 208}, Case{DType::kQ2_K, 82},
                       Case{DType::kQ3_K, 108}, Case{DType::kIQ2_S, 0}, Case{DType::kTQ1_0, 52}}) {
    const int64_t cols = 2 * info(c.type).block_elements;
    std::vector<uint8_t> bytes(bytes_of(c.type, cols), 0);
    const TensorView view = one_row(c.type, bytes.data(), cols);
    EXPECT_TRUE(scales_are_finite(view, 0));
    bytes[info(c.type).block_bytes + c.offset + 1] = 0x7c;  // infinity, in the second block
    EXPECT_FALSE(scales_are_finite(view, 0)) << info(c.type).name;
  }
  std::vector<uint8_t> bytes(34, 0);
  bytes[17] = 255;
  EXPECT_FALSE(scales_are_finite(one_row(DType::kMXFP4, bytes.data(), 64), 0));
}

TEST(Codec, RefusesWhatItCannotWrite) {
  float x[256] = {};
  std::byte out[256];
  EXPECT_THROW(quantize(DType::kQ4_K, x, out, 256), Error);
  EXPECT_THROW(dequantize(DType::kF8E4M3, out, x, 32), Error);
}

TEST(FloatBits, SmallFloatsRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float h = to_float(Half{static_cast<uint16_t>(bits)});
    const float b = to_float(BFloat16{static_cast<uint16_t>(bits)});
    if (!std::isnan(h)) {
      EXPECT_EQ(to_half(h).bits, bits);
    }
    if (!std::isnan(b)) {
      EXPECT_EQ(to_bfloat16(b).bits, bits);
    }
  }
}

}  // namespace
}  // namespace millrace::quant
