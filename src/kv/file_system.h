// FileSystem: the file operations of the disk tier, and nothing else. The one place where tests put faults
// (disk full, EIO, a write that stops half-way); real_file_system() is the machine's own.
// Every call returns 0 or an errno value; none throws. Called from the engine's thread (start) and from the
// tier's I/O threads at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace millrace::kv {

struct FileEntry {
  std::string name;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;  // since the epoch
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Makes the directory (and its parents) unless it is there.
  virtual int make_directory(const std::string& path) = 0;
  // Regular files of the directory, in no order.
  virtual int list(const std::string& directory, std::vector<FileEntry>& entries) = 0;
  // Creates path and writes the parts one after another. On an error a part of it may be left there.
  virtual int write(const std::string& path, std::span<const std::span<const std::byte>> parts) = 0;
  // Appends the file to `to`; EFBIG when it is longer than limit, which is then all that is appended.
  virtual int read(const std::string& path, std::vector<std::byte>& to, size_t limit) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int remove(const std::string& path) = 0;
  virtual int touch(const std::string& path) = 0;  // modified now
  // Takes the lock file for as long as `lock` lives (and this process: the system gives it back after
  // kill -9). EWOULDBLOCK when another process has it; `holder` is then what that one wrote into it.
  virtual int lock(const std::string& path, std::shared_ptr<void>& lock, std::string& holder) = 0;
};

FileSystem& real_file_system();

}  // namespace millrace::kv
