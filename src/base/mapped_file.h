// MappedFile: a read-only file mapping, RAII. Weights are used where they lie in it.
#pragma once

#include <cstddef>
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

// The whole file as text; for small files such as config.json. Throws Error{kIo}.
std::string read_text_file(const std::string& path);

// A file that appears whole or not at all: written beside its final name, renamed by commit(), removed by the
// destructor otherwise. Every failed write throws Error{kIo} with the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void commit();

 private:
  std::string path_;
  std::string temporary_path_;
  int fd_ = -1;
};

}  // namespace millrace
