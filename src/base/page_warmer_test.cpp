// Pages of a mapped file that were warmed are read without a fault.
#include "base/page_warmer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/mapped_file.h"

namespace millrace {
namespace {

constexpr size_t kWarmBytes = size_t{16} << 20;

class WarmPages : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() / ("millrace_warm_" + std::to_string(::getpid()));
    std::ofstream(path_, std::ios::binary) << std::string(kWarmBytes, 'x');
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::filesystem::path path_;
};

bool can_populate(const MappedFile& file) {
  constexpr int kPopulateRead = 22;
  return ::madvise(const_cast<std::byte*>(file.bytes().data()), 4096, kPopulateRead) == 0 || errno != EINVAL;
}

// Faults of this thread while it reads a byte of each page. Checked reads would touch a sanitizer's own pages
// too.
__attribute__((no_sanitize("address"), no_sanitize("thread"))) long faults_of_reading(
    const MappedFile& file) {
  rusage before{}, after{};
  ::getrusage(RUSAGE_THREAD, &before);
  for (size_t at = 0; at < file.bytes().size(); at += 4096)
    (void)*static_cast<const volatile std::byte*>(file.bytes().data() + at);
  ::getrusage(RUSAGE_THREAD, &after);
  return after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt;
}

TEST_F(WarmPages, AreReadWithoutAFault) {
  const MappedFile cold(path_.string()), warm(path_.string());
  if (!can_populate(cold)) GTEST_SKIP() << "this kernel enters no pages on request";
  PageWarmer warmer;
  // In two pieces, of which one begins within a page.
  warmer.add(warm.bytes().data(), kWarmBytes / 2 + 100);
  warmer.add(warm.bytes().data() + kWarmBytes / 2 + 100, kWarmBytes / 2 - 100);
  warmer.wait();
  const long with = faults_of_reading(warm), without = faults_of_reading(cold);
  EXPECT_EQ(with, 0);
  EXPECT_GT(without, 0);
}

TEST_F(WarmPages, StopsInTheMiddleAndTakesWhatIsMappedNoMore) {
  PageWarmer warmer;
  warmer.wait();  // for nothing
  warmer.add(nullptr, 5);
  {
    const MappedFile file(path_.string());
    for (int i = 0; i < 100; ++i) warmer.add(file.bytes().data(), file.bytes().size());
  }
  warmer.add(nullptr, 0);
}

}  // namespace
}  // namespace millrace
