// File access through the plain system calls, so that every refusal is known with its reason.
#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/descriptor.h"
#include "base/error.h"

namespace millrace {
namespace {

// Opens a regular file for reading and returns its descriptor and size.
std::pair<Descriptor, size_t> open_regular(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for its other end; regular files ignore it.
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) throw_error(ErrorCode::kIo, "{}: cannot open: {}", path, std::strerror(errno));
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0)
    throw_error(ErrorCode::kIo, "{}: cannot open: {}", path, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) {
    throw_error(ErrorCode::kIo, "{}: found {}, expected a regular file", path,
                S_ISDIR(status.st_mode) ? "a directory" : "a device or a pipe");
  }
  return {std::move(fd), static_cast<size_t>(status.st_size)};
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const auto [fd, size] = open_regular(path);
  if (size == 0) return;  // an empty mapping is not possible
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) {
    throw_error(ErrorCode::kIo, "{}: cannot map {} bytes: {}", path, size, std::strerror(errno));
  }
  data_ = static_cast<const std::byte*>(address);
  size_ = size;
  // A wish: kernels that keep files in huge pages (CONFIG_READ_ONLY_THP_FOR_FS) spare walks of the page
  // table.
  (void)::madvise(address, size, MADV_HUGEPAGE);
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
  constexpr size_t kMaxBytes = size_t{1} << 30;
  const auto [fd, size] = open_regular(path);
  if (size > kMaxBytes) {
    throw_error(ErrorCode::kIo, "{}: size: found {} bytes, expected at most {}", path, size, kMaxBytes);
  }
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(fd.get(), text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      throw_error(ErrorCode::kIo, "{}: read stopped at byte {} of {}: {}", path, done, size,
                  n < 0 ? std::strerror(errno) : "the file became shorter");
    }
    done += static_cast<size_t>(n);
  }
  return text;
}

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  struct stat status {};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) fail("create", EISDIR);
  if (exists && !S_ISREG(status.st_mode)) {
    device_ = true;
    fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail("open", errno);
    return;
  }
  // A link to a file keeps pointing there.
  std::error_code error;
  const std::filesystem::path real =
      exists ? std::filesystem::canonical(path, error) : std::filesystem::path(path);
  target_ = error ? path : real.string();
  static std::atomic<int> counter{0};
  temporary_path_ = fmt::format("{}.partial.{}.{}", target_, ::getpid(), counter++);
  open_temporary();
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (!device_ && !nameless_) ::unlink(temporary_path_.c_str());
}

void AtomicFile::fail(const char* what, int reason) {
  throw_error(ErrorCode::kIo, "{}: cannot {}: {}", path_, what, std::strerror(reason));
}

void AtomicFile::open_temporary() {
  const std::string parent = std::filesystem::path(target_).parent_path().string();
  // Naming it later goes through /proc.
  if (::access("/proc/self/fd", X_OK) == 0) {
    fd_ = ::open(parent.empty() ? "." : parent.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0644);
    nameless_ = fd_ >= 0;
    if (nameless_) return;
  }
  // Not every file system has nameless files (nor every kernel: those say EISDIR).
  ::unlink(temporary_path_.c_str());
  fd_ = ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("create", errno);
}

void AtomicFile::name_temporary() {
  if (!nameless_) return;
  ::unlink(temporary_path_.c_str());
  const std::string self = fmt::format("/proc/self/fd/{}", fd_);
  if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, temporary_path_.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    fail("finish writing", errno);
  }
  nameless_ = false;
}

// Copying into the page cache takes as long as encoding weights to 8 bits does, and those pages take the
// place of others. So whole pieces go from here to the disk, where the file system can do that.
bool AtomicFile::pass_cache(bool wanted) {
  const int flags = ::fcntl(fd_, F_GETFL);
  const int changed = wanted ? flags | O_DIRECT : flags & ~O_DIRECT;
  return flags >= 0 && ::fcntl(fd_, F_SETFL, changed) == 0 && wanted;
}

void AtomicFile::write(const void* data, size_t bytes) {
  MILLRACE_CHECK(fd_ >= 0);
  constexpr size_t kPieceBytes = size_t{4} << 20, kAlignment = 4096;
  const auto* from = static_cast<const std::byte*>(data);
  if (device_) return put(from, bytes);
  if (!held_) held_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, kPieceBytes)));
  if (!held_) throw std::bad_alloc();
  while (bytes > 0) {
    const size_t some = std::min(bytes, kPieceBytes - held_bytes_);
    std::memcpy(held_.get() + held_bytes_, from, some);
    held_bytes_ += some;
    from += some;
    bytes -= some;
    if (held_bytes_ < kPieceBytes) continue;
    if (written_ == 0) passes_cache_ = pass_cache(true);
    put(held_.get(), held_bytes_);
    held_bytes_ = 0;
  }
}

void AtomicFile::put(const std::byte* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, data, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && passes_cache_) {
      passes_cache_ = pass_cache(false);
      continue;
    }
    if (n < 0) fail("write", errno);
    data += n;
    bytes -= static_cast<size_t>(n);
    written_ += static_cast<size_t>(n);
  }
  // The disk begins now and not when commit() waits for it. A wish, like reading ahead.
  constexpr size_t kFlushBytes = size_t{8} << 20;
  if (passes_cache_ || written_ - flushed_ < kFlushBytes) return;
  (void)::sync_file_range(fd_, static_cast<off_t>(flushed_), static_cast<off_t>(written_ - flushed_),
                          SYNC_FILE_RANGE_WRITE);
  flushed_ = written_;
}

void AtomicFile::commit() {
  MILLRACE_CHECK(fd_ >= 0);
  if (!device_) {
    if (passes_cache_) passes_cache_ = pass_cache(false);  // the last piece may end anywhere
    put(held_.get(), held_bytes_);
    // Some file systems find out here that the disk is full.
    if (::fsync(fd_) != 0) fail("finish writing", errno);
    name_temporary();
    if (::rename(temporary_path_.c_str(), target_.c_str()) != 0) fail("finish writing", errno);
  }
  // From here on the file is in place: the destructor must not remove anything.
  if (::close(std::exchange(fd_, -1)) != 0) fail("finish writing", errno);
}

}  // namespace millrace
