#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace millrace {
namespace {

// Opens a regular file for reading and returns its descriptor and size.
std::pair<int, size_t> open_regular(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_error(ErrorCode::kIo, "{}: cannot open: {}", path, std::strerror(errno));
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    throw_error(ErrorCode::kIo, "{}: not a regular file", path);
  }
  return {fd, static_cast<size_t>(status.st_size)};
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const auto [fd, size] = open_regular(path);
  size_ = size;
  if (size > 0) {
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    const int reason = errno;
    ::close(fd);
    if (address == MAP_FAILED) {
      throw_error(ErrorCode::kIo, "{}: cannot map {} bytes: {}", path, size, std::strerror(reason));
    }
    data_ = static_cast<const std::byte*>(address);
  } else {
    ::close(fd);
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

std::string read_text_file(const std::string& path) {
  const auto [fd, size] = open_regular(path);
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(fd, text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int reason = n < 0 ? errno : EIO;
      ::close(fd);
      throw_error(ErrorCode::kIo, "{}: read stopped at byte {} of {}: {}", path, done, size,
                  std::strerror(reason));
    }
    done += static_cast<size_t>(n);
  }
  ::close(fd);
  return text;
}

AtomicFile::AtomicFile(const std::string& path)
    : path_(path), temporary_path_(fmt::format("{}.partial.{}", path, ::getpid())) {
  fd_ = ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) throw_error(ErrorCode::kIo, "{}: cannot create: {}", path, std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_path_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, from, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_error(ErrorCode::kIo, "{}: cannot write: {}", path_, std::strerror(errno));
    from += n;
    bytes -= static_cast<size_t>(n);
  }
}

void AtomicFile::commit() {
  if (::close(std::exchange(fd_, -1)) != 0 || ::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary_path_.c_str());
    throw_error(ErrorCode::kIo, "{}: cannot finish writing: {}", path_, std::strerror(reason));
  }
}

}  // namespace millrace
