// A block-scaled product as sm_100a computes it, on the host: tensor copies, bulk copies, tcgen05.cp and
// tcgen05.mma do here what the CUDA driver API and the PTX ISA say they do, with the descriptors, addresses
// and tiles of scales that the kernel (kernels/cuda/gemm/fp4_tcgen05.cu) computes by fp4_tiles.h, against the
// product of the rows in double.
#include "kernels/quant/fp4_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/float_bits.h"

namespace millrace::quant {
namespace {

double value_of(uint32_t code) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code < 8 ? kValues[code] : -kValues[code - 8];
}
double scale_of(bool nvfp4, uint8_t stored) {
  return nvfp4 ? to_float(Fp8E4M3{stored}) : std::ldexp(1.0, stored - 127);
}
uint64_t bits(uint64_t word, int first, int last) {
  return word >> first & ((uint64_t{1} << (last - first + 1)) - 1);
}

// A matrix as mr_fp4_gemm takes it, and its scales in tiles.
struct Operand {
  bool nvfp4;
  int64_t rows, k, blocks;
  std::vector<uint8_t> codes, scales, tiled;

  Operand(std::mt19937& random, bool with_e4m3, int64_t num_rows, int64_t depth, int64_t tile_rows)
      : nvfp4(with_e4m3), rows(num_rows), k(depth), blocks(depth / (with_e4m3 ? 16 : 32)) {
    for (int64_t i = 0; i < rows * k / 2; ++i) codes.push_back(static_cast<uint8_t>(random()));
    for (int64_t i = 0; i < rows * blocks; ++i)
      scales.push_back(static_cast<uint8_t>(nvfp4 ? random() % 0x7f : 120 + random() % 16));
    tiled.resize(static_cast<size_t>(fp4_tiled_scale_bytes(rows, k, nvfp4, tile_rows)));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < blocks; ++b)
        tiled[static_cast<size_t>(fp4_scale_byte(r, b, fp4_scale_tiles(k, nvfp4)))] =
            scales[static_cast<size_t>(r * blocks + b)];
    }
  }
  double at(int64_t row, int64_t column) const {
    const uint32_t byte = codes[static_cast<size_t>(row * k / 2 + column / 2)];
    return value_of(byte >> (4 * (column % 2)) & 15u) *
           scale_of(nvfp4, scales[static_cast<size_t>(row * blocks + column * blocks / k)]);
  }
};

// What a CTA has: shared memory, and tensor memory of 128 lanes x 512 columns.
struct Emulation {
  std::vector<uint8_t> shared = std::vector<uint8_t>(1 << 18, 0xee);
  std::vector<uint32_t> tensor = std::vector<uint32_t>(128 * kTensorColumns, 0xeeeeeeee);
  std::vector<double> sums = std::vector<double>(kFp4TileRows * kFp4TileColumns, NAN);

  // A box of 128 bytes x `rows` of a map of bytes with CU_TENSOR_MAP_SWIZZLE_128B: zeros outside; bits 4 to 6
  // of an address are those of the offset, xor its bits 7 to 9.
  void tensor_copy(uint32_t to, const Operand& from, int64_t byte, int64_t row, int rows) {
    ASSERT_EQ(to % 1024, 0u);
    for (uint32_t i = 0; i < static_cast<uint32_t>(rows) * 128; ++i) {
      const int64_t r = row + i / 128, c = byte + i % 128;
      const bool inside = r < from.rows && c < from.k / 2;
      shared[to + (i ^ (i >> 7 & 7u) << 4)] =
          inside ? from.codes[static_cast<size_t>(r * from.k / 2 + c)] : uint8_t{0};
    }
  }
  void bulk_copy(uint32_t to, const std::vector<uint8_t>& from, int64_t at, int bytes) {
    ASSERT_EQ(to % 16, 0u);
    ASSERT_LE(at + bytes, static_cast<int64_t>(from.size()));
    std::memcpy(shared.data() + to, from.data() + at, static_cast<size_t>(bytes));
  }

  // The byte at `byte` (of 16 columns' bytes and more) of row `row` of a K-major matrix that a descriptor
  // describes: core matrices of 8 rows, one 8 x 16 bytes (no swizzle) or 8 x 128 bytes (swizzled).
  uint8_t matrix_byte(uint64_t descriptor, uint32_t row, uint32_t byte) const {
    EXPECT_EQ(bits(descriptor, 46, 48), 1u);  // constant
    EXPECT_EQ(bits(descriptor, 49, 51), 0u);  // base offset: patterns begin at multiples of 1,024
    EXPECT_EQ(bits(descriptor, 53, 60), 0u);
    const auto start = static_cast<uint32_t>(bits(descriptor, 0, 13) << 4),
               stride = static_cast<uint32_t>(bits(descriptor, 32, 45) << 4);
    const auto swizzle = bits(descriptor, 61, 63);
    if (swizzle == 0) {
      EXPECT_LT(byte, 16u);
      return shared[start + row / 8 * stride + row % 8 * 16 + byte];
    }
    EXPECT_EQ(swizzle, 2u);
    const uint32_t address = start + row / 8 * stride + row % 8 * 128 + byte;
    return shared[address ^ (address >> 7 & 7u) << 4];
  }

  // tcgen05.cp.32x128b.warpx4
  void copy_scales(uint32_t column, uint64_t descriptor) {
    for (uint32_t lane = 0; lane < 128; ++lane) {
      for (uint32_t i = 0; i < 16; ++i) {
        uint32_t& word = tensor[lane * kTensorColumns + column + i / 4];
        word = (word & ~(0xffu << (8 * (i % 4)))) | uint32_t{matrix_byte(descriptor, lane % 32, i)}
                                                        << (8 * (i % 4));
      }
    }
  }
  // Scale of a row of a or b in words from `column` on: row r is in lane r % 32 (and 32, 64, 96 further on,
  // where other quarters of the rows look for it) of column r / 32.
  uint8_t scale_byte(uint32_t column, uint32_t row, uint32_t lane, uint32_t byte) const {
    EXPECT_LT(byte, 4u);
    return static_cast<uint8_t>(tensor[lane * kTensorColumns + column + row / 32] >> (8 * byte));
  }

  // tcgen05.mma.kind::mxf4nvf4.scale_vec::4X or kind::mxf4.scale_vec::2X
  void mma(bool nvfp4, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales,
           bool accumulate) {
    const auto m = static_cast<uint32_t>(bits(instruction, 27, 28) * 128),
               n = static_cast<uint32_t>(bits(instruction, 17, 22) * 8);
    ASSERT_EQ(m, 128u);
    ASSERT_EQ(n, 256u);
    EXPECT_EQ(bits(instruction, 7, 9), 1u);    // a: e2m1
    EXPECT_EQ(bits(instruction, 10, 11), 1u);  // b: e2m1
    EXPECT_EQ(bits(instruction, 23, 23), nvfp4 ? 0u : 1u);
    EXPECT_EQ(instruction & 0x8701f04fu, 0u);  // dense, K-major, nothing negated, K 64
    const auto a_id = static_cast<uint32_t>(bits(instruction, 29, 30)),
               b_id = static_cast<uint32_t>(bits(instruction, 4, 5));
    if (nvfp4) {
      ASSERT_EQ(a_id + b_id, 0u);  // scale_vec::4X takes the whole word
    } else {
      ASSERT_EQ(a_id % 2 + b_id % 2, 0u);  // scale_vec::2X takes a half of it
    }
    std::vector<double> left(m * 64), right(n * 64);
    const auto fill = [&](std::vector<double>& to, uint32_t rows, uint64_t codes, uint32_t scales,
                          uint32_t id) {
      for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t k = 0; k < 64; ++k) {
          const uint32_t code = matrix_byte(codes, r, k / 2) >> (4 * (k % 2)) & 15u;
          const uint8_t scale = scale_byte(scales, r, r % 128, id + k / (nvfp4 ? 16 : 32));
          to[r * 64 + k] = value_of(code) * scale_of(nvfp4, scale);
        }
      }
    };
    // A lane of the quarter that has the row: all four have the same.
    const auto same_quarters = [&](uint32_t column, uint32_t count) {
      for (uint32_t lane = 32; lane < 128; ++lane) {
        for (uint32_t c = column; c < column + count; ++c)
          ASSERT_EQ(tensor[lane * kTensorColumns + c], tensor[lane % 32 * kTensorColumns + c]);
      }
    };
    same_quarters(a_scales, m / 32);
    same_quarters(b_scales, n / 32);
    fill(left, m, a, a_scales, a_id);
    fill(right, n, b, b_scales, b_id);
    for (uint32_t i = 0; i < m; ++i) {
      for (uint32_t j = 0; j < n; ++j) {
        double sum = accumulate ? sums[i * n + j] : 0.0;
        for (uint32_t k = 0; k < 64; ++k) sum += left[i * 64 + k] * right[j * 64 + k];
        sums[i * n + j] = sum;
      }
    }
  }
};

// What the CTA of outputs from (row, column) on does, in the order of its two threads.
template <bool kNvfp4>
void run_cta(Emulation& on, const Operand& a, const Operand& b, int64_t row, int64_t column) {
  using Stage = Fp4Stage<kNvfp4>;
  const int64_t run = fp4_scale_tiles(a.k, kNvfp4) * kFp4ScaleTileBytes;
  for (int64_t i = 0; i < fp4_stages(a.k); ++i) {
    const auto slot = static_cast<int>(i % kFp4Stages);
    const auto stage = static_cast<uint32_t>(1024 + slot * Stage::kBytes);
    on.tensor_copy(stage + Stage::kA, a, i * kFp4RowBytes, row, kFp4TileRows);
    on.tensor_copy(stage + Stage::kB, b, i * kFp4RowBytes, column, kFp4TileColumns);
    const int64_t at = i * Stage::kScaleRun;
    on.bulk_copy(stage + Stage::kAScales, a.tiled, row / 128 * run + at, Stage::kScaleRun);
    on.bulk_copy(stage + Stage::kBScales, b.tiled, column / 128 * run + at, Stage::kScaleRun);
    on.bulk_copy(stage + Stage::kBScales + Stage::kScaleRun, b.tiled, (column / 128 + 1) * run + at,
                 Stage::kScaleRun);
    for (int tile = 0; tile < Stage::kScaleTiles; ++tile) {
      const auto skip = static_cast<uint32_t>(tile * kFp4ScaleTileBytes);
      on.copy_scales(Stage::a_scale_column(slot, tile),
                     fp4_scales_descriptor(stage + Stage::kAScales + skip));
      on.copy_scales(Stage::b_scale_column(slot, tile, 0),
                     fp4_scales_descriptor(stage + Stage::kBScales + skip));
      on.copy_scales(Stage::b_scale_column(slot, tile, 1),
                     fp4_scales_descriptor(stage + Stage::kBScales + Stage::kScaleRun + skip));
    }
    for (int step = 0; step < kFp4Steps; ++step) {
      const int tile = Stage::scale_tile(step);
      const uint32_t codes = stage + static_cast<uint32_t>(step * kFp4RowBytes / kFp4Steps);
      on.mma(kNvfp4, fp4_codes_descriptor(codes + Stage::kA), fp4_codes_descriptor(codes + Stage::kB),
             fp4_instruction_descriptor(kNvfp4, Stage::scale_id(step)), Stage::a_scale_column(slot, tile),
             Stage::b_scale_column(slot, tile, 0), i > 0 || step > 0);
    }
  }
}

// Odd numbers of rows, K of a ring of stages and a part of one, and a tile that is not the first.
template <bool kNvfp4>
void compare_with_rows(int64_t m, int64_t n, int64_t k) {
  std::mt19937 random(11);
  const Operand a(random, kNvfp4, m, k, kFp4TileRows), b(random, kNvfp4, n, k, kFp4TileColumns);
  const int64_t row = (m - 1) / kFp4TileRows * kFp4TileRows,
                column = (n - 1) / kFp4TileColumns * kFp4TileColumns;
  Emulation on;
  run_cta<kNvfp4>(on, a, b, row, column);
  if (testing::Test::HasFatalFailure()) return;
  for (int64_t i = 0; i < kFp4TileRows; ++i) {
    for (int64_t j = 0; j < kFp4TileColumns; ++j) {
      double expected = 0, magnitude = 0;
      if (row + i < m && column + j < n) {
        for (int64_t c = 0; c < k; ++c) {
          const double product = a.at(row + i, c) * b.at(column + j, c);
          expected += product, magnitude += std::fabs(product);
        }
      }
      ASSERT_NEAR(on.sums[static_cast<size_t>(i * kFp4TileColumns + j)], expected, 1e-13 * magnitude)
          << "row " << row + i << ", column " << column + j;
    }
  }
}

TEST(Fp4Tiles, Nvfp4AsTheInstructionsReadThem) { compare_with_rows<true>(131, 400, 1312); }
TEST(Fp4Tiles, Mxfp4AsTheInstructionsReadThem) { compare_with_rows<false>(131, 400, 608); }

// Each scale has a byte of its own, in the 32 x 4 x 4 order that cuBLAS documents for block scaling.
TEST(Fp4Tiles, ScalesLieInTilesOf128By4) {
  EXPECT_EQ(fp4_scale_byte(0, 0, 7), 0);
  EXPECT_EQ(fp4_scale_byte(0, 3, 7), 3);
  EXPECT_EQ(fp4_scale_byte(1, 0, 7), 16);
  EXPECT_EQ(fp4_scale_byte(32, 0, 7), 4);
  EXPECT_EQ(fp4_scale_byte(127, 3, 7), 511);
  EXPECT_EQ(fp4_scale_byte(0, 4, 7), 512);
  EXPECT_EQ(fp4_scale_byte(128, 0, 7), 7 * 512);
  std::vector<int> seen(2 * 3 * 512, 0);
  for (int64_t row = 0; row < 256; ++row) {
    for (int64_t block = 0; block < 12; ++block)
      ++seen.at(static_cast<size_t>(fp4_scale_byte(row, block, 3)));
  }
  for (const int count : seen) EXPECT_EQ(count, 1);
}

// The words themselves, put together from the tables of the PTX ISA.
TEST(Fp4Tiles, DescriptorsAsThePtxTablesHaveThem) {
  const uint64_t at = 0x2400;
  EXPECT_EQ(fp4_codes_descriptor(at),
            uint64_t{2} << 61 | uint64_t{1} << 46 | uint64_t{1024 / 16} << 32 | at / 16);
  EXPECT_EQ(fp4_scales_descriptor(at), uint64_t{1} << 46 | uint64_t{128 / 16} << 32 | at / 16);
  EXPECT_EQ(fp4_codes_descriptor(at + 32), fp4_codes_descriptor(at) + 2);  // the next step
  const uint32_t shape = 128u / 16 << 24 | 256u / 8 << 17 | 1u << 10 | 1u << 7;
  EXPECT_EQ(fp4_instruction_descriptor(true, 0), shape);
  EXPECT_EQ(fp4_instruction_descriptor(false, 0), shape | 1u << 23);
  EXPECT_EQ(fp4_instruction_descriptor(false, 2), shape | 1u << 23 | 2u << 29 | 2u << 4);
}

}  // namespace
}  // namespace millrace::quant
