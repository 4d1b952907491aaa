// ReadBefore over a real mapping: what is waited for is in memory (mincore), and the thread does not run
// away.
#include "base/read_before.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/mapped_file.h"

namespace millrace {
namespace {

constexpr size_t kBytes = size_t{24} << 20;

struct TestFile {
  std::string path =
      (std::filesystem::temp_directory_path() / ("millrace-read-before-" + std::to_string(::getpid())));
  TestFile() {
    AtomicFile file(path);
    const std::string piece(size_t{1} << 20, 'x');
    for (size_t done = 0; done < kBytes; done += piece.size()) file.write(piece.data(), piece.size());
    file.commit();
  }
  ~TestFile() { std::filesystem::remove(path); }
};

size_t resident(const std::byte* data, size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> in((bytes + page - 1) / page);
  EXPECT_EQ(::mincore(const_cast<std::byte*>(data), bytes, in.data()), 0);
  size_t count = 0;
  for (const unsigned char one : in) count += one & 1u;
  return count * page;
}

// The file was written past the page cache where that can be done.
TEST(ReadBefore, BringsInWhatIsWaitedFor) {
  const TestFile test;
  const MappedFile file(test.path);
  const std::byte* const data = file.bytes().data();
  ReadBefore before({{data, kBytes / 2}, {nullptr, 0}, {data + kBytes / 2, kBytes / 2}});
  before.wait_for(0, kBytes);
  EXPECT_EQ(resident(data, kBytes / 2), kBytes / 2);
  before.wait_for(1, 1);
  before.begin(2);
  before.wait_for(2, 5);
  before.wait_for(2, kBytes);
  EXPECT_EQ(resident(data, kBytes), kBytes);
  EXPECT_GE(before.waited(), 0.0);
}

TEST(ReadBefore, MayEndBeforeAnythingIsRead) {
  const TestFile test;
  const MappedFile file(test.path);
  for (int i = 0; i < 20; ++i) ReadBefore before({{file.bytes().data(), kBytes}});
  ReadBefore none({});
}

}  // namespace
}  // namespace millrace
