// Mapping and reading files, and that output appears whole or not at all: on success, on failure, on a full
// disk and when the process is killed.
#include "base/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"

namespace millrace {
namespace {

namespace fs = std::filesystem;

class MappedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "millrace_test_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string file(const char* name) const { return dir_ + "/" + name; }
  void put(const std::string& path, const std::string& text) const {
    std::ofstream(path, std::ios::binary) << text;
  }
  size_t num_files() const { return static_cast<size_t>(std::distance(fs::directory_iterator(dir_), {})); }

  std::string dir_;
};
using AtomicFileTest = MappedFileTest;

template <class Action>
std::string io_error(Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

TEST_F(MappedFileTest, MapsAndMoves) {
  put(file("a"), "hello");
  put(file("b"), "other");
  MappedFile a(file("a"));
  const std::byte* data = a.bytes().data();
  MappedFile moved(std::move(a));
  EXPECT_EQ(moved.bytes().data(), data);
  EXPECT_EQ(moved.path(), file("a"));
  MappedFile b(file("b"));
  b = std::move(moved);
  EXPECT_EQ(b.bytes().data(), data);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(b.bytes().data()), b.bytes().size()), "hello");
}

TEST_F(MappedFileTest, AnEmptyFileIsAnEmptySpan) {
  put(file("a"), "");
  EXPECT_TRUE(MappedFile(file("a")).bytes().empty());
  EXPECT_EQ(read_text_file(file("a")), "");
}

TEST_F(MappedFileTest, ReadsText) {
  const std::string text = std::string("a\0b\r\n", 5) + std::string(100000, 'x');
  put(file("a"), text);
  EXPECT_EQ(read_text_file(file("a")), text);
}

TEST_F(MappedFileTest, RefusesWhatIsNoReadableFile) {
  EXPECT_EQ(io_error([&] { MappedFile m(file("absent")); }),
            file("absent") + ": cannot open: No such file or directory");
  EXPECT_EQ(io_error([&] { MappedFile m(dir_); }), dir_ + ": found a directory, expected a regular file");
  EXPECT_EQ(io_error([&] { read_text_file(dir_); }), dir_ + ": found a directory, expected a regular file");
  // A pipe without a writer would block for ever.
  ASSERT_EQ(::mkfifo(file("pipe").c_str(), 0600), 0);
  EXPECT_EQ(io_error([&] { MappedFile m(file("pipe")); }),
            file("pipe") + ": found a device or a pipe, expected a regular file");
  put(file("huge"), "");
  fs::resize_file(file("huge"), (uintmax_t{1} << 30) + 1);
  EXPECT_EQ(io_error([&] { read_text_file(file("huge")); }),
            file("huge") + ": size: found 1073741825 bytes, expected at most 1073741824");
  if (::geteuid() != 0) {  // root may read everything
    put(file("secret"), "x");
    fs::permissions(file("secret"), fs::perms::none);
    EXPECT_EQ(io_error([&] { MappedFile m(file("secret")); }),
              file("secret") + ": cannot open: Permission denied");
  }
}

TEST_F(AtomicFileTest, AppearsAtCommit) {
  put(file("a"), "old");
  {
    AtomicFile out(file("a"));
    out.write("new ", 4);
    out.write("text", 4);
    EXPECT_EQ(read_text_file(file("a")), "old");
    out.commit();
    EXPECT_EQ(read_text_file(file("a")), "new text");
  }
  EXPECT_EQ(read_text_file(file("a")), "new text");
  EXPECT_EQ(num_files(), 1u);
}

TEST_F(AtomicFileTest, LeavesNothingWithoutCommit) {
  put(file("a"), "old");
  {
    AtomicFile out(file("a"));
    out.write("new", 3);
  }
  EXPECT_EQ(read_text_file(file("a")), "old");
  EXPECT_EQ(num_files(), 1u);
}

// What is large goes to the disk in whole pieces, past the page cache where that can be, then the rest.
TEST_F(AtomicFileTest, HoldsWhatIsManyPieces) {
  std::string expected;
  AtomicFile out(file("a"));
  for (size_t i = 0; expected.size() < (size_t{9} << 20); ++i) {
    const std::string part(i * 7919 % 300000 + 1, static_cast<char>('a' + i % 26));
    out.write(part.data(), part.size());
    expected += part;
  }
  out.commit();
  EXPECT_TRUE(read_text_file(file("a")) == expected);
}

TEST_F(AtomicFileTest, FollowsALink) {
  put(file("real"), "old");
  fs::create_symlink("real", file("link"));
  AtomicFile out(file("link"));
  out.write("new", 3);
  out.commit();
  EXPECT_TRUE(fs::is_symlink(file("link")));
  EXPECT_EQ(read_text_file(file("real")), "new");
}

TEST_F(AtomicFileTest, RefusesADirectoryAndAMissingOne) {
  EXPECT_EQ(io_error([&] { AtomicFile out(dir_); }), dir_ + ": cannot create: Is a directory");
  EXPECT_EQ(io_error([&] { AtomicFile out(file("no/such")); }),
            file("no/such") + ": cannot create: No such file or directory");
}

// Run by root, replacing /dev/null by a regular file would break the machine.
TEST_F(AtomicFileTest, WritesThroughADevice) {
  {
    AtomicFile out("/dev/null");
    out.write("x", 1);
    out.commit();
  }
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  AtomicFile full("/dev/full");
  EXPECT_EQ(io_error([&] { full.write("x", 1); }), "/dev/full: cannot write: No space left on device");
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

// A limit on the size of files stands for a disk that fills up in the middle of a write.
TEST_F(AtomicFileTest, AFullDiskIsReportedAndLeavesNothing) {
  const std::string path = file("a");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10000, 10000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int status = 1;
    try {
      AtomicFile out(path);
      const std::string block(4096, 'x');
      for (int i = 0; i < 10; ++i) out.write(block.data(), block.size());
      out.commit();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kIo && error.what() == path + ": cannot write: File too large")
        status = 0;
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(num_files(), 0u);
}

TEST_F(AtomicFileTest, AKilledProcessLeavesNothing) {
  // Only where the file system has nameless files; elsewhere nobody is left to remove the temporary file.
  const int probe = ::open(dir_.c_str(), O_WRONLY | O_TMPFILE, 0600);
  if (probe < 0) GTEST_SKIP() << dir_ << " is on a file system without O_TMPFILE";
  ::close(probe);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    AtomicFile out(file("a"));
    out.write("half", 4);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(num_files(), 0u);
}

}  // namespace
}  // namespace millrace
