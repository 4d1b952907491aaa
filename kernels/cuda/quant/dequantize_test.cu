// The device's decoders against the scalar codecs, on the host: every type, random bytes, equal to the bit.
// No GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/quant/dequantize_low_bits.cuh"
#include "kernels/quant/codec.h"
#include "kernels/quant/low_bits.h"

namespace millrace::cuda {
namespace {

constexpr int64_t kRows = 5;

struct Sample {
  std::vector<std::byte> data, scales;
  TensorView view;
  DeviceMatrix matrix;
};

std::vector<std::byte> random_bytes(size_t count, std::mt19937& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() & 255u);
  return bytes;
}

Sample make_sample(DType type, int64_t cols, std::mt19937& random) {
  Sample s;
  const auto row_bytes = static_cast<int64_t>(bytes_of(type, cols));
  s.data = random_bytes(static_cast<size_t>(kRows * row_bytes), random);
  s.view.type = type;
  s.view.rank = 2;
  s.view.shape = {kRows, cols, 1, 1};
  s.view.data = s.data.data();
  s.view.row_stride_bytes = row_bytes;
  s.matrix.data = reinterpret_cast<const uint8_t*>(s.data.data());
  s.matrix.rows = kRows;
  s.matrix.cols = cols;
  s.matrix.row_bytes = row_bytes;
  s.matrix.type = type;
  s.matrix.codebook = quant::codebook_of(type).data();
  return s;
}

void add_scales(Sample& s, DType type, int64_t rows_per_scale, int64_t cols_per_scale, std::mt19937& random) {
  const int64_t per_row = (s.matrix.cols + cols_per_scale - 1) / cols_per_scale;
  const int64_t grid_rows = (kRows + rows_per_scale - 1) / rows_per_scale;
  s.scales = random_bytes(bytes_of(type, grid_rows * per_row), random);
  s.view.scales = {s.scales.data(), type, rows_per_scale, cols_per_scale, per_row};
  s.matrix.scales = reinterpret_cast<const uint8_t*>(s.scales.data());
  s.matrix.scale_type = type;
  s.matrix.rows_per_scale = rows_per_scale;
  s.matrix.cols_per_scale = cols_per_scale;
  s.matrix.scales_per_row = per_row;
}

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

void expect_equal(const Sample& s) {
  const int64_t cols = s.matrix.cols;
  std::vector<float> expected(static_cast<size_t>(cols));
  for (int64_t row = 0; row < kRows; ++row) {
    quant::dequantize_row(s.view, row, expected.data());
    for (int64_t c = 0; c < cols; c += 8) {
      const int n = static_cast<int>(std::min<int64_t>(8, cols - c));
      float found[8];
      ASSERT_TRUE(
          with_any_decoder(s.view.type, [&](auto decoder) { decoder.decode8(s.matrix, row, c, n, found); }));
      for (int i = 0; i < 8; ++i) {
        const float wanted = i < n ? expected[static_cast<size_t>(c + i)] : 0.0f;
        ASSERT_TRUE(same(found[i], wanted)) << info(s.view.type).name << " row " << row << " column " << c + i
                                            << ": found " << found[i] << ", expected " << wanted;
      }
    }
  }
}

// Whatever DType there is: a type added later is tested, or this fails.
TEST(Decode, EveryTypeEqualsTheScalarCodec) {
  std::mt19937 random(1);
  for (int i = 0; i <= static_cast<int>(DType::kU8); ++i) {
    const auto type = static_cast<DType>(i);
    if (!with_any_decoder(type, [](auto) {})) {
      EXPECT_TRUE(type == DType::kI32 || type == DType::kU8) << info(type).name;  // no weights
      continue;
    }
    const int block = info(type).block_elements;
    for (const int64_t cols : block >= 64   ? std::vector<int64_t>{block, 3 * block}
                              : block == 32 ? std::vector<int64_t>{32, 96, 288}
                                            : std::vector<int64_t>{1, 7, 8, 12, 33, 64, 101}) {
      Sample s = make_sample(type, cols, random);
      if (type == DType::kMXFP4Split) add_scales(s, DType::kU8, 1, 32, random);
      expect_equal(s);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Decode, ScalesBesideTheValues) {
  std::mt19937 random(3);
  for (DType scale : {DType::kF32, DType::kBF16}) {
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{2, 32}, {1, 5}, {kRows, 100}, {1, 1}}) {
      Sample s = make_sample(DType::kF8E4M3, 100, random);
      add_scales(s, scale, rows, cols, random);
      expect_equal(s);
      Sample blocks = make_sample(DType::kNVFP4, 128, random);
      add_scales(blocks, scale, rows, cols, random);
      expect_equal(blocks);
    }
  }
}

}  // namespace
}  // namespace millrace::cuda
