// The tile kernels of AMX on any ARM machine, in an emulation of their instructions (immintrin.h here): every
// product of tiles against the kernels that decode uses, bit by bit. What an emulation cannot show is whether
// a processor does the same; same_bits_test.cpp and conformance_test.cpp do where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/attention/paged.h"
#include "kernels/cpu/attention/paged_amx.h"
#include "kernels/cpu/matmul/gemm_amx_bf16.h"
#include "kernels/cpu/matmul/gemm_amx_int8.h"
#include "kernels/cpu/matmul/gemv_interleaved_x86.h"
#include "kernels/cpu/matmul/gemv_x86.h"
#include "kernels/cpu/matmul/interleave_rows.h"
#include "kernels/cpu/matmul/quantize_int8.h"
#include "kernels/cpu/matmul/quantize_pow2.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::avx512 {
namespace {

constexpr AttentionFn kAttendByTiles = attend_amx<attend<KvFloat<LoadBF16>>>;
constexpr int64_t kBlockSize = sizeof(ActivationBlock);

// Activations [rows][cols] in every form.
struct ActivationFormats {
  ActivationFormats(int64_t num_rows, int64_t num_cols, std::mt19937& random)
      : rows(num_rows), cols(num_cols) {
    std::normal_distribution<float> normal;
    values.resize(static_cast<size_t>(rows * cols));
    for (float& x : values) x = normal(random);
    const int64_t runs = cols / kQuantBlock, groups = (rows + kTileHeight - 1) / kTileHeight;
    blocks.resize(static_cast<size_t>(rows * runs));
    pow2.resize(blocks.size());
    int8_tiles.resize(static_cast<size_t>(groups * runs));
    tiles.resize(static_cast<size_t>(rows * cols + kTileSlackBytes));
    for (int64_t m = 0; m < rows; ++m) {
      const float* x = values.data() + m * cols;
      quantize_int8(x, cols, blocks.data() + m * runs);
      quantize_pow2(x, cols, pow2.data() + m * runs);
      const int64_t group = m / kTileHeight;
      quantize_int8_tile(x, cols, int8_tiles.data() + group * runs, m % kTileHeight,
                         std::min(kTileHeight, rows - group * kTileHeight));
      const Bf16TileRow to = bf16_tile_row(tiles.data(), rows, cols, m);
      quantize_bf16_tile(x, cols, to.at, to.height);
    }
  }
  template <class T>
  static Panel panel(const std::vector<T>& data, int64_t row_bytes) {
    return {reinterpret_cast<const uint8_t*>(data.data()), row_bytes, nullptr};
  }
  Panel tile_panel() const {
    Panel of = panel(tiles, cols * 2);
    of.height = bf16_tile_height(rows);
    return of;
  }
  int64_t rows, cols;
  std::vector<float> values;
  std::vector<ActivationBlock> blocks, pow2;
  std::vector<Int8Tile> int8_tiles;
  std::vector<uint16_t> tiles;
};

// Random codes; `fix` makes a stored block's scales ones that a model may have.
template <class Fix>
std::vector<uint8_t> weights(int64_t rows, int64_t cols, int64_t elements, int64_t bytes,
                             std::mt19937& random, Fix fix) {
  std::vector<uint8_t> data(static_cast<size_t>(rows * cols / elements * bytes + 4096));
  for (uint8_t& x : data) x = static_cast<uint8_t>(random());
  for (int64_t b = 0; b < rows * cols / elements; ++b) fix(data.data() + b * bytes);
  return data;
}

constexpr int64_t kFirst = 3, kWeightRows = 78;
const int64_t kRowCounts[] = {7, 32, 75}, kTokens[] = {9, 16, 17, 33, 47, 64, 80, 97};

template <class Format>
void compare(const MatrixView& w, const ActivationFormats& x, const std::vector<ActivationBlock>& blocks,
             MatmulFn kernel, const Panel& panel, int64_t rows) {
  const int64_t row_bytes = x.cols / kQuantBlock * kBlockSize;
  std::vector<float> got(static_cast<size_t>(x.rows * rows)), want(got.size());
  for (int64_t m = 0; m < x.rows; m += 8) {  // eight rows are the most of decode's kernels
    const Panel part{reinterpret_cast<const uint8_t*>(blocks.data()) + m * row_bytes, row_bytes, nullptr};
    gemv<Format>(w, kFirst, rows, part, std::min<int64_t>(8, x.rows - m), want.data() + m * rows, rows);
  }
  kernel(w, kFirst, rows, panel, x.rows, got.data(), rows);
  ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
      << x.rows << " rows of activations, " << rows << " of weights";
}

template <class Format, class Fix>
void compare_tiles(int64_t cols, int64_t elements, Fix fix) {
  std::mt19937 random(1);
  const int64_t bytes = Format::kBlockBytes;
  const std::vector<uint8_t> data = weights(kWeightRows, cols, elements, bytes, random, fix);
  const MatrixView w{data.data(), cols / elements * bytes, data.data(), 0, cols};
  const int64_t row_bytes = cols / kQuantBlock * kBlockSize;
  for (const int64_t m : kTokens) {
    const ActivationFormats x(m, cols, random);
    for (const int64_t rows : kRowCounts) {
      compare<Format>(w, x, x.blocks, amx_int8_tile_matmul<Format>,
                      ActivationFormats::panel(x.int8_tiles, row_bytes), rows);
      compare<Format>(w, x, x.blocks, amx_int8_matmul<Format, gemv<Format>>,
                      ActivationFormats::panel(x.blocks, row_bytes), rows);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AmxEmulated, Int8TilesGiveTheBitsOfDecode) {
  compare_tiles<FormatQ8_0>(2880, 32,
                            [](uint8_t* block) { block[1] = static_cast<uint8_t>(0x20 + block[1] % 4); });
}
// Of rows that lie interleaved, tiles are packed as vectors read them.
TEST(AmxEmulated, Int8TilesOfInterleavedRowsGiveTheBitsOfDecode) {
  std::mt19937 random(5);
  constexpr int64_t kCols = 352, kBytes = FormatQ4_1::kBlockBytes, kWhole = (kWeightRows + 15) / 16 * 16;
  const std::vector<uint8_t> plain = weights(kWhole, kCols, 32, kBytes, random, [](uint8_t* block) {
    for (int i : {1, 3}) block[i] = static_cast<uint8_t>(0x20 + block[i] % 4);
  });
  std::vector<uint8_t> together(plain.size());
  const auto layout = interleaved_layout(Format::kQ4_1, 16);
  const int64_t row_bytes = kCols / 32 * kBytes;
  for (int64_t at = 0; at < kWhole / 16 * row_bytes; at += kBytes) {
    const uint8_t* rows[16];
    for (int64_t r = 0; r < 16; ++r) {
      rows[r] = plain.data() + (at / row_bytes * 16 + r) * row_bytes + at % row_bytes;
    }
    interleave_block(*layout, rows, 16, together.data() + 16 * at);
  }
  const MatrixView w{plain.data(), row_bytes, nullptr, 0, kCols},
      of_groups{together.data(), row_bytes, nullptr, 0, kCols};
  const int64_t block_bytes = kCols / kQuantBlock * kBlockSize;
  for (const int64_t m : {1, 8, 9, 33, 80}) {
    const ActivationFormats x(m, kCols, random);
    const Panel tiles = ActivationFormats::panel(x.int8_tiles, block_bytes),
                blocks = ActivationFormats::panel(x.blocks, block_bytes);
    for (const int64_t rows : kRowCounts) {
      std::vector<float> want(static_cast<size_t>(m * rows)), got(want.size());
      amx_int8_tile_matmul<FormatQ4_1>(w, kFirst, rows, tiles, m, want.data(), rows);
      amx_int8_tile_matmul<Interleaved<FormatQ4_1>>(of_groups, kFirst, rows, tiles, m, got.data(), rows);
      ASSERT_EQ(got, want) << m << " rows of activations, " << rows << " of weights";
      std::fill(got.begin(), got.end(), 0.0f);
      interleaved_matmul<FormatQ4_1>(of_groups, kFirst, rows, blocks, m, got.data(), rows);
      ASSERT_EQ(got, want) << m << " rows of activations, " << rows << " of weights";
    }
  }
}
TEST(AmxEmulated, Int8TilesWithMinimumsGiveTheBitsOfDecode) {
  compare_tiles<FormatQ4_1>(352, 32, [](uint8_t* block) {
    for (int i : {1, 3}) block[i] = static_cast<uint8_t>(0x20 + block[i] % 4);
  });
}
TEST(AmxEmulated, Int8TilesOfTwoDigitsGiveTheBitsOfDecode) {
  compare_tiles<FormatQ6_K>(512, 256,
                            [](uint8_t* block) { block[209] = static_cast<uint8_t>(0x20 + block[209] % 4); });
}

// 254 and 255 are scales of a damaged file, whose rows become NaN.
TEST(AmxEmulated, TilesOfMxfp4GiveTheBitsOfDecode) {
  std::mt19937 random(2);
  for (const int64_t cols : {2880, 64}) {
    auto data = weights(kWeightRows, cols, 32, 17, random,
                        [](uint8_t* block) { *block = static_cast<uint8_t>(90 + *block % 60); });
    const MatrixView w{data.data(), cols / 32 * 17, data.data(), 0, cols};
    std::vector<uint8_t> scales(static_cast<size_t>(kWeightRows * cols / 32 + 64));
    for (uint8_t& e : scales) e = static_cast<uint8_t>(90 + random() % 60);
    const MatrixView split{data.data(), cols / 2, scales.data(), cols / 32, cols};
    for (const int64_t m : {1, 9, 16, 17, 31, 47, 57, 64, 97, 256, 270}) {
      if (m > 100 && cols > 64) continue;
      const ActivationFormats x(m, cols, random);
      const Panel tiles = x.tile_panel();
      for (const int64_t rows : kRowCounts) {
        compare<FormatMXFP4>(w, x, x.pow2, amx_bf16_matmul<FormatMXFP4>, tiles, rows);
        compare<FormatMXFP4Split>(split, x, x.pow2, amx_bf16_matmul<FormatMXFP4Split>, tiles, rows);
        if (HasFatalFailure()) return;
      }
    }
    const ActivationFormats x(20, cols, random);
    std::vector<float> out(20 * 32);
    data[static_cast<size_t>((kFirst + 20) * w.row_bytes + 17)] = 255;
    data[static_cast<size_t>((kFirst + 5) * w.row_bytes)] = 254;
    amx_bf16_matmul<FormatMXFP4>(w, kFirst, 32, x.tile_panel(), 20, out.data(), 32);
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(std::isnan(out[i]), i % 32 == 20 || i % 32 == 5) << "row " << i % 32 << ", cols " << cols;
    }
  }
}

TEST(AmxEmulated, AGroupBecomesTilesAsItsRowsDo) {
  std::mt19937 random(3);
  ActivationFormats x(16, 640, random);
  const auto at = [&](int64_t row, int64_t col) -> float& {
    return x.values[static_cast<size_t>(row * 640 + col)];
  };
  for (int64_t i = 0; i < 32; ++i) {
    at(3, 64 + i) = 0.0f;
    at(7, i) = 1e-30f * static_cast<float>(i);
    at(9, 96 + i) *= 1e30f;
  }
  at(2, 40) = std::numeric_limits<float>::infinity();
  at(4, 41) = std::numeric_limits<float>::quiet_NaN();
  at(11, 500) = 127.5f / 64;  // would round to 128
  at(12, 7) = -0x1p-60f;
  for (const int64_t height : {16, 13, 8, 7, 1}) {
    const float* rows[16];
    std::vector<uint16_t> want(static_cast<size_t>(height * 640)), got(want.size());
    for (int64_t r = 0; r < height; ++r) {
      rows[r] = &at(r, 0);
      const Bf16TileRow to = bf16_tile_row(want.data(), height, 640, r);
      quantize_bf16_tile(rows[r], 640, to.at, to.height);
    }
    quantize_bf16_tile_group(rows, height, 640, got.data());
    EXPECT_EQ(got, want) << height;
  }
}

// One layer's cache of some KV heads, its blocks in any order, and rows of queries that see parts of it.
struct AttentionCase {
  AttentionCase(int32_t head_dim, int32_t tokens, std::mt19937& random, int32_t num_heads = 1)
      : dim(head_dim), heads(num_heads) {
    std::normal_distribution<float> normal;
    const int32_t blocks = (tokens + kLanes - 1) / kLanes, words = kLanes * dim;
    for (int32_t b = 0; b < blocks; ++b) table.push_back(b);
    std::shuffle(table.begin(), table.end(), random);
    pool.resize(static_cast<size_t>(2 * heads * blocks * words + 32), 0x7fc1);  // what nobody wrote: NaN
    for (int32_t t = 0; t < tokens; ++t) {
      uint16_t* block = pool.data() + int64_t{2} * heads * table[static_cast<size_t>(t / kLanes)] * words;
      for (int32_t i = 0; i < heads * dim; ++i) {
        const int32_t head = i / dim, d = i % dim;
        const auto bits = [&] { return static_cast<uint16_t>(emulated::as<uint32_t>(normal(random)) >> 16); };
        block[head * words + d * kLanes + t % kLanes] = bits();
        block[(heads + head) * words + t % kLanes * dim + d] = bits();
      }
    }
  }
  // The same of an int8 cache: random codes, and scales of about 0.03.
  void make_int8(std::mt19937& random) {
    int8 = true;
    for (uint16_t& two : pool) two = static_cast<uint16_t>(random() & 0x7f7f);
    for (size_t head = 0; head < table.size() * 2 * static_cast<size_t>(heads); ++head) {
      uint16_t* scales = scales_of(static_cast<int32_t>(head));
      for (int32_t i = 0; i < dim / 2; ++i) scales[i] = static_cast<uint16_t>(0x2600 + random() % 0x600);
    }
  }
  int64_t head_bytes() const { return int8 ? dim * (kLanes + 1) : dim * kLanes * 2; }
  // Of a run of the pool: [dim / 32][16 tokens], of 32 dimensions two bytes for each of 16 tokens.
  uint16_t* scales_of(int32_t run) {
    return reinterpret_cast<uint16_t*>(reinterpret_cast<uint8_t*>(pool.data()) + run * head_bytes());
  }
  uint16_t& scale(int32_t token, int32_t part, int32_t head, bool of_value) {
    const int32_t run = (2 * table[static_cast<size_t>(token / kLanes)] + (of_value ? 1 : 0)) * heads + head;
    return scales_of(run)[part * kLanes + token % kLanes];
  }
  uint16_t& value(int32_t token, int32_t d, int32_t head = 0) {
    const int32_t block = table[static_cast<size_t>(token / kLanes)], run = (2 * block + 1) * heads + head;
    return pool[static_cast<size_t>((run * kLanes + token % kLanes) * dim + d)];
  }
  uint16_t& key(int32_t token, int32_t d, int32_t head) {
    const int32_t run = 2 * table[static_cast<size_t>(token / kLanes)] * heads + head;
    return pool[static_cast<size_t>((run * dim + d) * kLanes + token % kLanes)];
  }
  void add_row(int32_t from, int32_t to, std::mt19937& random) {
    std::normal_distribution<float> normal;
    first.push_back(from);
    last.push_back(to);
    for (int32_t d = 0; d < dim; ++d) queries.push_back(normal(random));
  }

  struct Result {
    std::vector<float> row_max, row_sum, acc;
  };
  // Rows [row, row + count) with `together` heads from `head` on: results [head][count + 1], so that heads
  // are not where rows would be.
  Result run(AttentionFn kernel, size_t row, size_t count, int32_t head = 0, int32_t together = 1) const {
    const size_t apart = count + 1, all = apart * static_cast<size_t>(together);
    Result r{std::vector<float>(all, -7.0f), std::vector<float>(all, -7.0f),
             std::vector<float>(all * static_cast<size_t>(dim), -7.0f)};
    std::vector<float> scores(all * (kTileTokens + kLanes), std::numeric_limits<float>::quiet_NaN());
    std::vector<const float*> query;
    for (size_t i = 0; i < count * static_cast<size_t>(together); ++i) {
      query.push_back(queries.data() + (row + i % count) * static_cast<size_t>(dim));
    }
    AttentionSplit s{};
    s.heads = together;
    s.head_rows = static_cast<int64_t>(apart);
    s.pool = reinterpret_cast<const uint8_t*>(pool.data());
    s.head_bytes = head_bytes();
    s.block_bytes = 2 * heads * s.head_bytes;
    s.table = table.data();
    s.key_offset = head * s.head_bytes;
    s.value_offset = (heads + head) * s.head_bytes;
    s.head_dim = s.padded_dim = dim;
    s.rows = static_cast<int32_t>(count);
    s.query = query.data();
    std::vector<ActivationBlock> blocks(queries.size() / kQuantBlock);
    quantize_int8(queries.data(), static_cast<int64_t>(queries.size()), blocks.data());
    std::vector<const ActivationBlock*> query_blocks;
    for (const float* q : query) query_blocks.push_back(blocks.data() + (q - queries.data()) / kQuantBlock);
    s.query_blocks = query_blocks.data();
    s.first = first.data() + row;
    s.last = last.data() + row;
    s.scale = 0.125f;
    s.row_max = r.row_max.data();
    s.row_sum = r.row_sum.data();
    s.acc = r.acc.data();
    s.scores = scores.data();
    std::copy(after.begin(), after.end(), s.next_blocks);
    s.prefetched = !after.empty();
    kernel(s);
    return r;
  }

  int32_t dim, heads;
  bool int8 = false;
  std::vector<int32_t> table, first, last;
  std::vector<const uint8_t*> after;  // as in AttentionSplit; if any, this split was prefetched as well
  std::vector<uint16_t> pool;
  std::vector<float> queries;
};

// All rows and `together` heads from `head` on, against every row and head alone.
void compare_with_rows_alone(const AttentionCase& c, int32_t head = 0, int32_t together = 1) {
  const size_t rows = c.first.size(), dims = static_cast<size_t>(c.dim);
  const AttentionFn kernel = c.int8 ? AttentionFn{attend<KvInt8>} : kAttendByTiles;
  const auto all = c.run(kernel, 0, rows, head, together);
  for (int32_t h = 0; h < together; ++h) {
    for (size_t r = 0; r < rows; ++r) {
      const auto alone = c.run(kernel, r, 1, head + h);
      const size_t at = static_cast<size_t>(h) * (rows + 1) + r;
      ASSERT_EQ(std::memcmp(&all.row_max[at], alone.row_max.data(), 4), 0) << "row " << r << ", head " << h;
      ASSERT_EQ(std::memcmp(&all.row_sum[at], alone.row_sum.data(), 4), 0) << "row " << r << ", head " << h;
      ASSERT_EQ(std::memcmp(&all.acc[at * dims], alone.acc.data(), 4 * dims), 0)
          << "row " << r << ", head " << h;
    }
  }
}

AttentionCase some_attention(int32_t dim, std::mt19937& random, int32_t heads = 1) {
  constexpr int32_t kSeen = 203;
  AttentionCase c(dim, kSeen, random, heads);
  for (int32_t r = 0; r < 8; ++r) c.add_row(0, kSeen - 3 + r / 4, random);
  for (const auto& [from, to] : {std::pair{0, 1},
                                 {70, 203},
                                 {15, 17},
                                 {64, 128},
                                 {63, 65},
                                 {5, 5},
                                 {190, 203},
                                 {37, 38},
                                 {16, 48},
                                 {0, 203},
                                 {100, 180}}) {
    c.add_row(from, to, random);
  }
  return c;
}

TEST(AmxEmulated, AttentionByTilesIsNearThatOfVectors) {
  std::mt19937 random(4);
  for (const int32_t dim : {64, 32, 96, 128}) {
    const AttentionCase c = some_attention(dim, random);
    const size_t rows = c.first.size(), dims = static_cast<size_t>(dim);
    const auto got = c.run(kAttendByTiles, 0, rows), want = c.run(attend<KvFloat<LoadBF16>>, 0, rows);
    for (size_t r = 0; r < rows; ++r) {
      EXPECT_NEAR(got.row_max[r], want.row_max[r], 1e-4f) << "row " << r << " of " << dim;
      EXPECT_NEAR(got.row_sum[r], want.row_sum[r], 2e-4f * std::abs(want.row_sum[r]))
          << "row " << r << " of " << dim;
      for (size_t d = 0; d < dims; ++d) {
        ASSERT_NEAR(got.acc[r * dims + d], want.acc[r * dims + d], 4e-4f * std::abs(want.row_sum[r]))
            << "row " << r << ", dimension " << d << " of " << dim;
      }
    }
  }
}

TEST(AmxEmulated, HeadsOfAttentionTogetherHaveTheSameBitsAsAlone) {
  std::mt19937 random(6);
  for (const AttentionFn kernel : {kAttendByTiles, AttentionFn{attend<KvFloat<LoadBF16>>}}) {
    const AttentionCase c = some_attention(64, random, 5);
    const size_t rows = c.first.size();
    for (const auto& [head, together] : {std::pair{0, 5}, {1, 2}, {3, 2}, {0, 4}}) {
      const auto all = c.run(kernel, 0, rows, head, together);
      for (int32_t h = 0; h < together; ++h) {
        const auto alone = c.run(kernel, 0, rows, head + h);
        const size_t at = static_cast<size_t>(h) * (rows + 1);
        ASSERT_EQ(std::memcmp(&all.row_max[at], alone.row_max.data(), 4 * (rows + 1)), 0) << "head " << h;
        ASSERT_EQ(std::memcmp(&all.row_sum[at], alone.row_sum.data(), 4 * (rows + 1)), 0) << "head " << h;
        ASSERT_EQ(std::memcmp(&all.acc[at * 64], alone.acc.data(), 256 * (rows + 1)), 0) << "head " << h;
      }
    }
  }
}

TEST(AmxEmulated, ARowOfAttentionHasTheSameBitsAmongOthers) {
  std::mt19937 random(5);
  AttentionCase c = some_attention(64, random);
  const size_t rows = c.first.size();
  compare_with_rows_alone(c);
  // A token's value that is no number reaches the rows that see it, and no other.
  c.value(66, 5) = 0x7fc0;
  c.value(101, 40) = 0x7f80;
  compare_with_rows_alone(c);
  const auto all = c.run(kAttendByTiles, 0, rows);
  for (size_t r = 0; r < rows; ++r) {
    const auto sees = [&](int32_t token) { return c.first[r] <= token && token < c.last[r]; };
    for (size_t d = 0; d < 64; ++d) {
      ASSERT_EQ(std::isnan(all.acc[r * 64 + d]), d == 5 && sees(66)) << "row " << r << ", dimension " << d;
      ASSERT_EQ(std::isinf(all.acc[r * 64 + d]), d == 40 && sees(101)) << "row " << r;
    }
  }
}

// Eight rows of decode, whose whole tiles have an order of their own.
TEST(AmxEmulated, EightRowsOfAttentionHaveTheBitsOfOneAndOfHeadsAlone) {
  std::mt19937 random(7);
  constexpr int32_t kSeen = 512 + 128 + 37, kHeads = 4;
  const auto eight_rows = [&](int32_t from, int32_t to) {
    AttentionCase c(64, kSeen, random, kHeads);
    for (int32_t r = 0; r < 8; ++r) c.add_row(from, to, random);
    return c;
  };
  std::vector<AttentionCase> cases;
  for (const auto& [from, to] : {std::pair{0, kSeen},  // whole tiles, then a ragged one
                                 {0, 512},             // whole ones only
                                 {0, 64},
                                 {64, 192},
                                 {37, kSeen - 3},  // a window: the first is ragged as well
                                 {130, 200},       // no tile is whole
                                 {130, 256}}) {
    cases.push_back(eight_rows(from, to));
  }
  cases.push_back(eight_rows(0, 400));  // two tokens of four heads each, a window
  for (size_t r = 0; r < 8; ++r) {
    cases.back().first[r] = r < 4 ? 127 : 128;
    cases.back().last[r] = r < 4 ? 384 : 385;
  }
  cases.push_back(eight_rows(0, 400));  // a row that sees nothing
  cases.back().last[3] = 0;
  for (AttentionCase& c : cases) {
    for (const auto& [head, together] : {std::pair{2, 1}, {0, 2}, {1, 3}}) {
      SCOPED_TRACE(testing::Message() << "positions " << c.first[0] << " to " << c.last[0] << ", heads "
                                      << head << " to " << head + together);
      compare_with_rows_alone(c, head, together);
      if (HasFatalFailure()) return;
    }
    // Values that are no numbers: of tokens that are seen, in the first and in later tiles, and that are not.
    const int32_t last = c.last[0], seen[] = {c.first[0], c.first[0] + 1, (c.first[0] + last) / 2, last - 1};
    const int32_t unseen[] = {c.first[0] - 1, last, last + 1};
    const auto is_seen = [&](int32_t token, size_t r) { return c.first[r] <= token && token < c.last[r]; };
    for (const int32_t token : seen) c.value(token, 5, 1) = 0x7fc0;
    c.value(seen[2], 40, 2) = 0xff80;
    for (int32_t d = 0; d < 64; ++d) {  // row 0's largest score: a weight of one, whose lower half is zero
      const float key = 4.0f * c.queries[static_cast<size_t>(d)];
      c.key(seen[2], d, 2) = static_cast<uint16_t>(emulated::as<uint32_t>(key) >> 16);
    }
    for (const int32_t token : unseen) {
      if (token >= 0 && token < kSeen) c.value(token, 17, 2) = c.value(token, 18, 1) = 0x7f80;
    }
    compare_with_rows_alone(c, 1, 2);
    if (HasFatalFailure()) return;
    const auto two = c.run(kAttendByTiles, 0, 8, 1, 2);
    for (size_t i = 0; i < 2 * 8 * 64; ++i) {
      const size_t head = 1 + i / (8 * 64), r = i / 64 % 8, d = i % 64;
      bool nan = false, inf = false;
      for (const int32_t token : seen) nan |= head == 1 && d == 5 && is_seen(token, r);
      inf |= head == 2 && d == 40 && is_seen(seen[2], r);
      for (const int32_t token : unseen) {  // by row 0, but others may
        inf |= d == (head == 1 ? 18 : 17) && token >= 0 && token < kSeen && is_seen(token, r);
      }
      const float value = two.acc[((head - 1) * 9 + r) * 64 + d];
      ASSERT_EQ(std::isnan(value), nan) << "head " << head << ", row " << r << ", dimension " << d;
      ASSERT_EQ(std::isinf(value), inf) << "head " << head << ", row " << r << ", dimension " << d;
    }
    // And keys: the row's sums are none either.
    c.key(seen[2], 3, 2) = 0x7fc0;
    c.key(seen[1], 9, 1) = 0x7f80;
    compare_with_rows_alone(c, 1, 2);
    if (HasFatalFailure()) return;
  }
}

// Softmax of eight rows side by side gives what it gives one.
TEST(AmxEmulated, EightRowsOfAnInt8CacheHaveTheBitsOfOneAndOfHeadsAlone) {
  std::mt19937 random(8);
  for (const int32_t dim : {64, 32, 160}) {
    constexpr int32_t kSeen = 512 + 128 + 37;
    AttentionCase c(dim, kSeen, random, 4);
    c.make_int8(random);
    for (int32_t r = 0; r < 8; ++r) c.add_row(37, kSeen - 3, random);
    c.add_row(0, 200, random);
    for (int32_t d = 0; d < dim; ++d)
      c.queries[static_cast<size_t>(d)] *= 60.0f;  // exponentials that are zero
    compare_with_rows_alone(c, 1, 1);
    compare_with_rows_alone(c, 0, 4);
    const auto before = c.run(attend<KvInt8>, 0, 8, 2);
    c.scale(30, 0, 2, false) = c.scale(30, 0, 2, true) = 0x7e00;  // not seen
    const auto after = c.run(attend<KvInt8>, 0, 8, 2);
    ASSERT_EQ(std::memcmp(before.acc.data(), after.acc.data(), before.acc.size() * 4), 0);
    c.scale(300, dim / 32 - 1, 1, true) = 0x7e00;  // seen: a value, and a key
    c.scale(400, 0, 3, false) = 0x7e00;
    compare_with_rows_alone(c, 0, 4);
    const auto damaged = c.run(attend<KvInt8>, 0, 8, 1);
    for (int32_t d = 0; d < dim; ++d) {
      ASSERT_EQ(std::isnan(damaged.acc[static_cast<size_t>(d)]), d >= dim - 32) << d;
    }
    ASSERT_TRUE(std::isnan(c.run(attend<KvInt8>, 0, 8, 3).row_sum[0]));
    if (HasFatalFailure()) return;
  }
}

// Every line of keys and values is prefetched once, in order, a lead ahead; where no block is known to
// follow, some line of this split again.
TEST(AmxEmulated, DecodePrefetchesEveryLineOnceAndInOrder) {
  std::mt19937 random(8);
  constexpr int32_t kSeen = 512, kBlocks = kSeen / kLanes, kHeads = 4, kHead = 1;
  constexpr int64_t kRunLines = kLanes * 64 * 2 / 64, kMaxLead = (48 << 10) / 64;
  AttentionCase c(64, 2 * kSeen, random, kHeads);
  for (int32_t r = 0; r < 8; ++r) c.add_row(0, kSeen, random);
  const auto block_at = [&](int32_t b) {
    return reinterpret_cast<const uint8_t*>(c.pool.data()) +
           c.table[static_cast<size_t>(b)] * 2 * kHeads * kRunLines * 64;
  };
  for (const bool goes_on : {false, true}) {
    for (int32_t b = 0; b < 8 && goes_on; ++b) {
      c.after.push_back(b == 3 || b > 4 ? nullptr : block_at(kBlocks + 9 + b));
    }
    for (const int32_t together : {1, 2, 3}) {
      std::vector<const void*> lines, prefetched;
      for (int32_t b = 0; b < kBlocks + 8; ++b) {
        const uint8_t* block = b < kBlocks ? block_at(b) : nullptr;
        if (b >= kBlocks && goes_on) block = c.after[static_cast<size_t>(b - kBlocks)];
        for (const int32_t run : {kHead, kHeads + kHead}) {
          for (int64_t i = 0; i < together * kRunLines; ++i) {
            lines.push_back(block == nullptr ? nullptr : block + (run * kRunLines + i) * 64);
          }
        }
      }
      emulated::prefetched = &prefetched;
      c.run(kAttendByTiles, 0, 8, kHead, together);
      emulated::prefetched = nullptr;
      const int64_t tile = kTileTokens / kLanes * 2 * together * kRunLines, all = kSeen / kTileTokens * tile;
      const int64_t lead = std::min(kMaxLead, 2 * tile);
      // The first tile of a split that nobody prefetched, for_each_tile prefetches.
      const int64_t from = goes_on ? lead : std::min(tile, lead);
      ASSERT_EQ(std::ssize(prefetched), lead + all - from) << together << " heads";
      for (int64_t i = from; i < lead + all; ++i) {
        const void *want = lines[static_cast<size_t>(i)], *got = prefetched[static_cast<size_t>(i - from)];
        if (want != nullptr) {
          ASSERT_EQ(got, want) << together << " heads, line " << i;
        } else {
          ASSERT_EQ(std::count(lines.begin(), lines.begin() + all, got), 1)
              << together << " heads, line " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::avx512
