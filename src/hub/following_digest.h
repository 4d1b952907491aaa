// The hash of a file while it grows: a thread reads what is complete from the start on, mostly out of the
// page cache, so that the check of a large file is over when its last byte has come.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "hub/digest.h"

namespace millrace::hub {

class FollowingDigest {
 public:
  // Reads from `fd` (pread), which must stay open.
  FollowingDigest(std::unique_ptr<Digest> digest, int fd);
  ~FollowingDigest();
  FollowingDigest(const FollowingDigest&) = delete;
  FollowingDigest& operator=(const FollowingDigest&) = delete;

  void grown_to(uint64_t bytes);  // everything before is written
  uint64_t hashed() const;
  // The whole is `size` bytes and written; true once the hash is known.
  bool finished(uint64_t size);
  std::string hex();  // once, after finished(); throws Error{kIo} when the file could not be read

 private:
  void run();

  std::unique_ptr<Digest> digest_;
  int fd_;
  mutable std::mutex mutex_;
  std::condition_variable grown_;
  uint64_t available_ = 0, hashed_ = 0;
  bool ended_ = false;
  int error_ = 0;
  std::thread thread_;
};

}  // namespace millrace::hub
