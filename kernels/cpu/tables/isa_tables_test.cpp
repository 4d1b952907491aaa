// Kernel tables are put together from parts: nothing was forgotten, neither a kernel that every table has,
// nor one that wider vectors have for themselves.
#include "kernels/cpu/tables/isa_tables.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string_view>

#include "kernels/cpu/tables/features.h"

namespace millrace::cpu {
namespace {

// A table as words: pointers to functions and a few numbers.
constexpr size_t kWords = sizeof(KernelTable) / sizeof(uint64_t);
using Words = std::array<uint64_t, kWords>;
Words words_of(const KernelTable& table) {
  Words words;
  static_assert(sizeof words == sizeof table);
  std::memcpy(words.data(), &table, sizeof words);
  return words;
}
// The words of the kernels of some formats.
bool is_matmul(size_t word, Format first, Format last) {
  const size_t at = offsetof(KernelTable, matmul) / sizeof(uint64_t);
  return word >= at + static_cast<size_t>(first) && word <= at + static_cast<size_t>(last);
}
// Everything that all tables have lies before the members with a default.
constexpr size_t kOfAll = offsetof(KernelTable, rows_per_pass) / sizeof(uint64_t);

TEST(KernelTables, HaveEveryKernelThatScalarHas) {
  const Words scalar = words_of(scalar_table());
  for (size_t i = 0; i < kOfAll; ++i) {
    const bool interleaved = is_matmul(i, Format::kInterleavedQ4_K, Format::kInterleavedMXFP4);
    EXPECT_EQ(scalar[i] == 0, interleaved) << "word " << i;
  }
  for (const KernelTable* table : runnable_tables()) {
    const Words words = words_of(*table);
    for (size_t i = 0; i < kOfAll; ++i) {
      EXPECT_TRUE(scalar[i] == 0 || words[i] != 0) << table->name << ", word " << i;
    }
  }
}

TEST(KernelTables, OfWiderVectorsShareNothingWithNarrowerOnes) {
  const KernelTable* narrower = &scalar_table();
  for (const KernelTable* table : runnable_tables()) {
    const std::string_view name = table->name;
    if (name != "neon" && name != "avx2" && name != "avx512_bw") continue;
    const Words words = words_of(*table), others = words_of(*narrower);
    for (size_t i = 0; i < kOfAll; ++i) {
      const bool none =
          table->interleaved_rows == 0 && is_matmul(i, Format::kInterleavedQ4_K, Format::kInterleavedMXFP4);
      const bool without_lanes = name == "avx512_bw" && is_matmul(i, Format::kIQ4_NL, Format::kQ2_K);
      EXPECT_EQ(words[i] == others[i], none || without_lanes) << name << ", word " << i;
    }
    narrower = table;
  }
}

}  // namespace
}  // namespace millrace::cpu
