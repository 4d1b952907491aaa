// How many instructions the two hot kernels of decoding spend per block of 32 weights, counted by valgrind
// and held to a bound: a compiler or an edit that puts a tile back into memory shows here, whatever the
// machine is doing meanwhile. The test runs itself under callgrind with few and with more products; the
// difference is the kernel's.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "kernels/cpu/tables/features.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kRows = 32, kCols = 1024;
constexpr int kFew = 4, kMore = 24;

struct Hot {
  const char* name;
  Format format;
  int64_t block_bytes;
};
constexpr Hot kHot[] = {{"q8_0", Format::kQ8_0, 34}, {"mxfp4", Format::kMXFP4, 17}};

// Instructions per block of 32 weights, one activation row; measured, and a tenth more. A table without an
// entry is counted and not judged.
const std::map<std::string, std::array<double, 2>> kBounds = {
    {"neon", {17.0, 22.0}},  // 15.4, 19.9 by g++ 12; what valgrind 3.19 runs on ARM: it lacks sdot
    // 21.10, 18.55 by g++ 12 -O3; what valgrind runs on x86, where it lacks AVX-512. More than a sum across
    // the registers of a row took (10.96, 17.28), in three quarters of its time: hadd is three operations and
    // a chain.
    {"avx2", {23.2, 20.4}},
};

// What callgrind counts: MILLRACE_TEST_COUNT says which kernel and how often.
TEST(CountedChild, Product) {
  const char* wanted = std::getenv("MILLRACE_TEST_COUNT");
  if (wanted == nullptr) GTEST_SKIP() << "run by InstructionCount";
  const KernelTable& table = choose_table("");
  const Hot& hot = kHot[wanted[0] - '0'];
  const std::vector<uint8_t> weights(static_cast<size_t>(kRows * kCols / 32 * hot.block_bytes + 4096), 0x11);
  const std::vector<float> x(kCols, 0.5f);
  std::vector<ActivationBlock> blocks(kCols / kQuantBlock);
  std::vector<float> out(kRows);
  table.quantize_int8(x.data(), kCols, blocks.data());
  const MatrixView w{weights.data(), kCols / 32 * hot.block_bytes, nullptr, 0, kCols};
  const Panel panel{reinterpret_cast<const uint8_t*>(blocks.data()), 0, nullptr};
  for (int i = std::atoi(wanted + 2); i > 0; --i) {
    table.matmul[static_cast<int>(hot.format)](w, 0, kRows, panel, 1, out.data(), kRows);
  }
  std::printf("table %s\n", table.name);
}

// Instructions of a run of the child; its table's name. -1 when valgrind cannot run it.
double count(int kernel, int products, std::string& table) {
  std::array<char, 4096> self{};
  FILE* link = popen("readlink /proc/$PPID/exe", "r");
  if (link == nullptr || std::fgets(self.data(), self.size(), link) == nullptr) return -1;
  pclose(link);
  std::string path(self.data());
  path.erase(path.find('\n'));
  const std::string command = "MILLRACE_TEST_COUNT=" + std::to_string(kernel) + ":" +
                              std::to_string(products) +
                              " valgrind --tool=callgrind --callgrind-out-file=/dev/null '" + path +
                              "' --gtest_filter=CountedChild.Product 2>&1";
  FILE* child = popen(command.c_str(), "r");
  if (child == nullptr) return -1;
  double instructions = -1;
  std::array<char, 512> line{};
  while (std::fgets(line.data(), line.size(), child) != nullptr) {
    const std::string text(line.data());
    if (text.rfind("table ", 0) == 0) table = text.substr(6, text.find('\n') - 6);
    const size_t at = text.find("Collected : ");
    if (at != std::string::npos) instructions = std::strtod(text.c_str() + at + 12, nullptr);
  }
  return pclose(child) == 0 ? instructions : -1;
}

TEST(InstructionCount, HotKernels) {
  if (std::system("valgrind --version > /dev/null 2>&1") != 0) {
    GTEST_SKIP() << "valgrind is not installed: the instruction counts of the hot kernels were NOT checked";
  }
  for (int kernel = 0; kernel < 2; ++kernel) {
    std::string table;
    const double few = count(kernel, kFew, table), more = count(kernel, kMore, table);
    if (few < 0 || more < 0) {
      GTEST_SKIP() << "valgrind cannot run this program: the instruction counts were NOT checked";
    }
    const double per_block = (more - few) / static_cast<double>((kMore - kFew) * kRows * kCols / 32);
    std::printf("%s %s: %.2f instructions per 32 weights\n", table.c_str(), kHot[kernel].name, per_block);
    RecordProperty(table + "_" + kHot[kernel].name, std::to_string(per_block));
    EXPECT_GT(per_block, 1.0);
    const auto bound = kBounds.find(table);
    if (bound == kBounds.end()) continue;
    EXPECT_LE(per_block, bound->second[static_cast<size_t>(kernel)]) << table << " " << kHot[kernel].name;
  }
}

}  // namespace
}  // namespace millrace::cpu
