// MappedFile: a read-only file mapping, RAII. Weights are used where they lie in it.
// AtomicFile: output that appears whole or not at all.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>

namespace millrace {

class MappedFile {
 public:
  // Throws Error{kIo} naming the path when it cannot be opened, is not a regular file or cannot be mapped.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The whole file as text; for small files such as tokenizer.json. Throws Error{kIo}, also for one over 1 GiB.
std::string read_text_file(const std::string& path);

// A file that appears whole or not at all. It has no name until commit() gives it one, so that a process that
// is killed leaves nothing behind; where the file system cannot do that it is written beside its final name
// and removed by the destructor. A path that names a device or a pipe is written through, never replaced.
// Every failed write throws Error{kIo} with the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void commit();  // once; nothing may be written after it

 private:
  [[noreturn]] void fail(const char* what, int reason);
  void open_temporary();
  void name_temporary();  // gives a nameless file its temporary name
  void put(const std::byte* data, size_t bytes);
  bool pass_cache(bool wanted);  // whether writes then go past the page cache

  std::string path_;            // as given, for messages
  std::string target_;          // what is replaced: path_ with its links followed
  std::string temporary_path_;  // beside target_
  bool nameless_ = false;       // open, but without an entry in the directory
  bool device_ = false;         // a device or a pipe
  int fd_ = -1;
  size_t written_ = 0, flushed_ = 0;  // bytes written, and those the disk was asked to take
  // What is not written yet: a piece is, when it is whole. Aligned as the disk wants it.
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> held_;
  size_t held_bytes_ = 0;
  bool passes_cache_ = false;
};

}  // namespace millrace
