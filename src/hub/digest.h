// Hashes of files: SHA-256 of what is in LFS, git's SHA-1 of the rest. By OpenSSL, which comes with libcurl.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace millrace::hub {

class Digest {
 public:
  virtual ~Digest() = default;
  virtual void update(std::span<const std::byte> bytes) = 0;
  virtual std::string hex() = 0;  // once, at the end
};
std::unique_ptr<Digest> make_sha256();
// Of a git blob: the hash of "blob SIZE\0" and the content.
std::unique_ptr<Digest> make_blob_sha1(uint64_t size);

}  // namespace millrace::hub
