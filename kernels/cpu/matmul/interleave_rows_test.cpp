// Products with weights of four interleaved rows: to the bit those of the scalar table with the same weights
// where they lie, for rows that begin and end anywhere, few and many activation rows, rows longer than a
// pass.
#include <gtest/gtest.h>

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
  Format format, interleaved;
  int64_t block_bytes;
  int64_t half_at[2];  // where f16 scales lie
  void (*pack)(const uint8_t* const* rows, uint8_t* to);
};
constexpr Kind kKinds[] = {
    {"q4_k", Format::kQ4_K, Format::kInterleavedQ4_K, 144, {0, 2}, interleave_block_q4_k},
    {"q5_k", Format::kQ5_K, Format::kInterleavedQ5_K, 176, {0, 2}, interleave_block_q5_k},
    {"q6_k", Format::kQ6_K, Format::kInterleavedQ6_K, 210, {208, 208}, interleave_block_q6_k},
};

// Random bytes, with scales that are numbers; some large and some subnormal.
std::vector<uint8_t> random_blocks(std::mt19937& random, const Kind& kind, int64_t blocks) {
  std::vector<uint8_t> bytes(static_cast<size_t>(blocks * kind.block_bytes));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  for (int64_t b = 0; b < blocks; ++b) {
    for (const int64_t at : kind.half_at) {
      auto half = static_cast<uint16_t>(random() & 0xbfffu);  // below 2 either way
      if (b % 7 == 3) half = 0x7bff;                          // the largest
      if (b % 7 == 5) half = 0x0001;                          // the smallest
      std::memcpy(&bytes[static_cast<size_t>(b * kind.block_bytes + at)], &half, 2);
    }
  }
  return bytes;
}

std::vector<uint8_t> interleave(const Kind& kind, const std::vector<uint8_t>& bytes, int64_t rows,
                                int64_t blocks) {
  std::vector<uint8_t> to(bytes.size());
  for (int64_t i = 0; i < rows / 4 * blocks; ++i) {
    const int64_t four = i / blocks, b = i % blocks;
    const uint8_t* at[4];
    for (int64_t r = 0; r < 4; ++r) {
      at[r] = bytes.data() + ((4 * four + r) * blocks + b) * kind.block_bytes;
    }
    kind.pack(at, to.data() + 4 * (four * blocks + b) * kind.block_bytes);
  }
  return to;
}

void compare(const KernelTable& table, const Kind& kind, int64_t rows, int64_t cols, int64_t num_m) {
  std::mt19937 random(static_cast<uint32_t>(rows * 31 + cols * 7 + num_m));
  const int64_t blocks = cols / 256, row_bytes = blocks * kind.block_bytes;
  const std::vector<uint8_t> plain = random_blocks(random, kind, rows * blocks);
  const std::vector<uint8_t> fours = interleave(kind, plain, rows, blocks);
  std::uniform_real_distribution<float> values(-3.0f, 3.0f);
  std::vector<float> x(static_cast<size_t>(num_m * cols));
  for (float& v : x) v = values(random);
  std::vector<ActivationBlock> activations(x.size() / kQuantBlock);
  scalar_table().quantize_int8(x.data(), static_cast<int64_t>(x.size()), activations.data());
  const Panel panel{reinterpret_cast<const uint8_t*>(activations.data()),
                    cols / kQuantBlock * static_cast<int64_t>(sizeof(ActivationBlock)), nullptr};
  for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{4}, int64_t{7}}) {
    for (const int64_t count : {int64_t{1}, int64_t{2}, int64_t{6}, rows - first}) {
      if (first + count > rows) continue;
      std::vector<float> want(static_cast<size_t>(num_m * count)), got(want.size() + 4, -7.0f);
      scalar_table().matmul[static_cast<int>(kind.format)]({plain.data(), row_bytes, nullptr, 0, cols}, first,
                                                           count, panel, num_m, want.data(), count);
      table.matmul[static_cast<int>(kind.interleaved)]({fours.data(), row_bytes, nullptr, 0, cols}, first,
                                                       count, panel, num_m, got.data(), count);
      ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0)
          << table.name << " " << kind.name << " rows " << first << " + " << count << " of " << cols
          << " columns, " << num_m << " activation rows";
      for (size_t i = want.size(); i < got.size(); ++i) ASSERT_EQ(got[i], -7.0f) << "written past the end";
    }
  }
}

TEST(Interleaved, SameBitsAsWhereTheyLie) {
  int tables = 0;
  for (const KernelTable* table : runnable_tables()) {
    if (table->matmul[static_cast<int>(Format::kInterleavedQ4_K)] == nullptr) continue;
    ++tables;
    for (const Kind& kind : kKinds) {
      for (const int64_t num_m : {1, 2, 3, 4, 7, 8, 11, 12, 13, 21, 64})
        compare(*table, kind, 20, 768, num_m);
      compare(*table, kind, 8, 256, 1);
      compare(*table, kind, 12, 16384 + 512, 1);  // more than a pass of 512 runs
      compare(*table, kind, 12, 16384 + 512, 14);
    }
  }
  if (tables == 0) GTEST_SKIP() << "no table of this processor has kernels for interleaved rows";
}

}  // namespace
}  // namespace millrace::cpu
