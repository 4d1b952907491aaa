// Products with weights of interleaved rows: to the bit those of the scalar table with the same weights
// where they lie, for rows that begin and end anywhere, few and many activation rows, rows longer than a
// pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu/matmul/interleave_rows.h"
#include "kernels/cpu/tables/features.h"
#include "kernels/cpu/tables/isa_tables.h"
#include "kernels/quant/blocks.h"

namespace millrace::cpu {
namespace {

struct Kind {
  const char* name;
  Format format;
  int64_t elements, block_bytes;
  std::vector<int64_t> halves;  // where f16 scales lie
};
const Kind kKinds[] = {
    {"q8_0", Format::kQ8_0, 32, 34, {0}},      {"q4_0", Format::kQ4_0, 32, 18, {0}},
    {"q4_1", Format::kQ4_1, 32, 20, {0, 2}},   {"q5_0", Format::kQ5_0, 32, 22, {0}},
    {"q5_1", Format::kQ5_1, 32, 24, {0, 2}},   {"q4_z", Format::kQ4_Z, 32, 18, {}},
    {"mxfp4", Format::kMXFP4, 32, 17, {}},     {"q4_k", Format::kQ4_K, 256, 144, {0, 2}},
    {"q5_k", Format::kQ5_K, 256, 176, {0, 2}}, {"q6_k", Format::kQ6_K, 256, 210, {208}},
};

// Random bytes, with scales that are numbers; some large and some subnormal.
std::vector<uint8_t> random_blocks(std::mt19937& random, const Kind& kind, int64_t blocks) {
  std::vector<uint8_t> bytes(static_cast<size_t>(blocks * kind.block_bytes));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  for (int64_t b = 0; b < blocks; ++b) {
    if (kind.format == Format::kMXFP4) bytes[static_cast<size_t>(b * kind.block_bytes)] &= 0x7f;
    for (const int64_t at : kind.halves) {
      auto half = static_cast<uint16_t>(random() & 0xbfffu);  // below 2 either way
      if (b % 7 == 3) half = 0x7bff;                          // the largest
      if (b % 7 == 5) half = 0x0001;                          // the smallest
      std::memcpy(&bytes[static_cast<size_t>(b * kind.block_bytes + at)], &half, 2);
    }
  }
  return bytes;
}

// The last row repeated where rows are missing.
std::vector<uint8_t> interleave(const InterleavedLayout& layout, const Kind& kind,
                                const std::vector<uint8_t>& bytes, int64_t rows, int64_t blocks,
                                int64_t together) {
  const int64_t groups = (rows + together - 1) / together;
  std::vector<uint8_t> to(static_cast<size_t>(groups * together * blocks * kind.block_bytes));
  for (int64_t i = 0; i < groups * blocks; ++i) {
    const int64_t group = i / blocks, b = i % blocks;
    std::vector<const uint8_t*> at;
    for (int64_t r = 0; r < together; ++r) {
      const int64_t row = std::min(together * group + r, rows - 1);
      at.push_back(bytes.data() + (row * blocks + b) * kind.block_bytes);
    }
    interleave_block(layout, at.data(), together, to.data() + together * i * kind.block_bytes);
  }
  return to;
}

// A product whose rows are computed once, by the scalar table from weights where they lie.
struct Product {
  Product(const Kind& of, int64_t all_rows, int64_t all_cols, int64_t activation_rows)
      : kind(of), rows(all_rows), cols(all_cols), num_m(activation_rows), blocks(all_cols / of.elements) {
    std::mt19937 random(static_cast<uint32_t>(rows * 31 + cols * 7 + num_m));
    plain = random_blocks(random, kind, rows * blocks);
    std::uniform_real_distribution<float> values(-3.0f, 3.0f);
    x.resize(static_cast<size_t>(num_m * cols));
    for (float& v : x) v = values(random);
    activations.resize(x.size() / kQuantBlock);
    scalar_table().quantize_int8(x.data(), static_cast<int64_t>(x.size()), activations.data());
    want.resize(static_cast<size_t>(num_m * rows));
    scalar_table().matmul[static_cast<int>(kind.format)](
        {plain.data(), blocks * kind.block_bytes, nullptr, 0, cols}, 0, rows, panel(), num_m, want.data(),
        rows);
  }

  Panel panel() const {
    return {reinterpret_cast<const uint8_t*>(activations.data()),
            cols / kQuantBlock * static_cast<int64_t>(sizeof(ActivationBlock)), nullptr};
  }
  std::vector<Int8Tile> tiles(const KernelTable& table) const {
    std::vector<Int8Tile> to;
    if (table.quantize_int8_tile == nullptr) return to;
    to.resize(static_cast<size_t>((num_m + kTileHeight - 1) / kTileHeight * cols / kQuantBlock));
    for (int64_t m = 0; m < num_m; ++m) {
      const int64_t group = m / kTileHeight * kTileHeight;
      table.quantize_int8_tile(x.data() + m * cols, cols, to.data() + group / kTileHeight * cols / 32,
                               m - group, std::min(kTileHeight, num_m - group));
    }
    return to;
  }
  // `got` [num_m][count] and four floats behind it, which were -7.
  void expect(const std::vector<float>& got, int64_t first, int64_t count, const char* what) const {
    for (int64_t m = 0; m < num_m; ++m) {
      ASSERT_EQ(std::memcmp(got.data() + m * count, want.data() + m * rows + first,
                            static_cast<size_t>(count) * sizeof(float)),
                0)
          << what << ", " << kind.name << " rows " << first << " + " << count << " of " << cols
          << " columns, row " << m << " of " << num_m << " activation rows";
    }
    for (size_t i = static_cast<size_t>(num_m * count); i < got.size(); ++i)
      ASSERT_EQ(got[i], -7.0f) << what << ", written past the end";
  }

  const Kind& kind;
  const int64_t rows, cols, num_m, blocks;
  std::vector<uint8_t> plain;
  std::vector<float> x, want;
  std::vector<ActivationBlock> activations;
};

void compare(const KernelTable& table, const Product& product) {
  const Kind& kind = product.kind;
  const auto layout = interleaved_layout(kind.format, table.interleaved_rows);
  ASSERT_TRUE(layout);
  const auto interleaved = static_cast<int>(layout->format);
  if (table.matmul[interleaved] == nullptr) return;
  const std::vector<uint8_t> together =
      interleave(*layout, kind, product.plain, product.rows, product.blocks, table.interleaved_rows);
  const MatrixView w{together.data(), product.blocks * kind.block_bytes, nullptr, 0, product.cols};
  const Panel panel = product.panel();
  const std::vector<Int8Tile> int8_tiles = product.tiles(table);
  const Panel tiles{reinterpret_cast<const uint8_t*>(int8_tiles.data()), panel.row_bytes, nullptr};
  for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{4}, int64_t{7}}) {
    for (const int64_t count : {int64_t{1}, int64_t{2}, int64_t{6}, int64_t{33}, product.rows - first}) {
      if (first + count > product.rows) continue;
      std::vector<float> got(static_cast<size_t>(product.num_m * count) + 4, -7.0f);
      table.matmul[interleaved](w, first, count, panel, product.num_m, got.data(), count);
      product.expect(got, first, count, table.name);
      if (table.int8_tile_matmul[interleaved] == nullptr || ::testing::Test::HasFatalFailure()) continue;
      std::fill(got.begin(), got.end() - 4, 0.0f);
      table.int8_tile_matmul[interleaved](w, first, count, tiles, product.num_m, got.data(), count);
      product.expect(got, first, count, "amx, as tiles");
    }
  }
}

TEST(Interleaved, SameBitsAsWhereTheyLie) {
  std::vector<const KernelTable*> tables = runnable_tables();
  tables.erase(std::remove_if(tables.begin(), tables.end(),
                              [](const KernelTable* table) { return table->interleaved_rows == 0; }),
               tables.end());
  if (tables.empty()) GTEST_SKIP() << "no table of this processor has kernels for interleaved rows";
  for (const Kind& kind : kKinds) {
    const auto every_table = [&](int64_t rows, int64_t cols, int64_t num_m) {
      const Product product(kind, rows, cols, num_m);
      for (const KernelTable* table : tables) compare(*table, product);
    };
    for (const int64_t num_m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 21, 64}) every_table(20, 768, num_m);
    for (const int64_t num_m : {1, 3, 17, 300}) every_table(83, 256, num_m);
    if (kind.elements == 32) every_table(83, 11 * 32, 1);
    if (kind.elements == 32) every_table(83, 11 * 32, 19);
    every_table(8, 256, 1);
    every_table(12, 16384 + 512, 1);  // more than a pass of 512 runs
    every_table(12, 16384 + 512, 14);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace millrace::cpu
