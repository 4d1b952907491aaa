#include "kv/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/descriptor.h"

namespace millrace::kv {
namespace {

int write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return 0;
}

class RealFileSystem final : public FileSystem {
 public:
  int make_directory(const std::string& path) override {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    return error.value();
  }

  int list(const std::string& directory, std::vector<FileEntry>& entries) override {
    DIR* dir = ::opendir(directory.c_str());
    if (dir == nullptr) return errno;
    const std::shared_ptr<DIR> closer(dir, ::closedir);
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(dir);
      if (entry == nullptr) return errno;
      struct stat status {};
      // A link is not ours: it is not followed.
      if (::fstatat(::dirfd(dir), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
      if (!S_ISREG(status.st_mode)) continue;
      entries.push_back({entry->d_name, static_cast<uint64_t>(status.st_size),
                         status.st_mtim.tv_sec * int64_t{1000000000} + status.st_mtim.tv_nsec});
    }
  }

  int write(const std::string& path, std::span<const std::span<const std::byte>> parts) override {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return errno;
    int status = 0;
    for (const auto& part : parts) {
      if (status == 0) status = write_all(fd, part);
    }
    if (::close(fd) != 0 && status == 0) status = errno;
    return status;
  }

  int read(const std::string& path, std::vector<std::byte>& to, size_t limit) override {
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (fd.get() < 0) return errno;
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) return errno;
    const bool longer = static_cast<uint64_t>(status.st_size) > limit;
    const size_t begin = to.size(), size = longer ? limit : static_cast<size_t>(status.st_size);
    to.resize(begin + size);
    size_t done = 0;
    while (done < size) {
      const ssize_t n = ::read(fd.get(), to.data() + begin + done, size - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno;
      if (n == 0) break;  // it became shorter: the reader of the format will see
      done += static_cast<size_t>(n);
    }
    to.resize(begin + done);
    return longer ? EFBIG : 0;
  }

  int rename(const std::string& from, const std::string& to) override {
    return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
  }
  int remove(const std::string& path) override { return ::unlink(path.c_str()) == 0 ? 0 : errno; }
  int touch(const std::string& path) override {
    return ::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
  }

  int lock(const std::string& path, std::shared_ptr<void>& lock, std::string& holder) override {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return errno;
    auto owner = std::make_shared<Descriptor>(fd);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      char text[32];
      const ssize_t n = ::pread(fd, text, sizeof(text), 0);
      if (n > 0) holder.assign(text, static_cast<size_t>(n));
      return reason;
    }
    const std::string me = std::to_string(::getpid());
    if (::ftruncate(fd, 0) != 0) return errno;
    if (::pwrite(fd, me.data(), me.size(), 0) < 0) return errno;
    lock = std::move(owner);
    return 0;
  }
};

}  // namespace

FileSystem& real_file_system() {
  static RealFileSystem files;
  return files;
}

}  // namespace millrace::kv
