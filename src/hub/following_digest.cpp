#include "hub/following_digest.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace millrace::hub {

FollowingDigest::FollowingDigest(std::unique_ptr<Digest> digest, int fd)
    : digest_(std::move(digest)), fd_(fd), thread_([this] { run(); }) {}

FollowingDigest::~FollowingDigest() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  grown_.notify_one();
  thread_.join();
}

void FollowingDigest::grown_to(uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    available_ = std::max(available_, bytes);
  }
  grown_.notify_one();
}

uint64_t FollowingDigest::hashed() const {
  const std::lock_guard lock(mutex_);
  return hashed_;
}

bool FollowingDigest::finished(uint64_t size) {
  const std::lock_guard lock(mutex_);
  return error_ != 0 || hashed_ == size;
}

std::string FollowingDigest::hex() {
  const std::lock_guard lock(mutex_);
  if (error_ != 0) {
    throw_error(ErrorCode::kIo, "a file that was fetched cannot be read back: {}", std::strerror(error_));
  }
  return digest_->hex();
}

void FollowingDigest::run() {
  constexpr size_t kPiece = size_t{1} << 20;
  std::vector<std::byte> buffer(kPiece);
  std::unique_lock lock(mutex_);
  while (true) {
    grown_.wait(lock, [&] { return ended_ || available_ > hashed_; });
    if (ended_) return;
    const uint64_t at = hashed_;
    const size_t bytes = std::min<uint64_t>(kPiece, available_ - at);
    lock.unlock();
    const ssize_t got = ::pread(fd_, buffer.data(), bytes, static_cast<off_t>(at));
    if (got > 0) digest_->update({buffer.data(), static_cast<size_t>(got)});
    const int reason = got > 0 ? 0 : got == 0 ? EIO : errno;
    lock.lock();
    if (reason == EINTR) continue;
    if (reason != 0) {
      error_ = reason;
      return;
    }
    hashed_ = at + static_cast<uint64_t>(got);
  }
}

}  // namespace millrace::hub
