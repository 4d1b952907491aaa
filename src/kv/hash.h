// The two hashes of the cache, each tested against its published vectors.
//   Blake2b (RFC 7693)  names a block by its content: cryptographic, so that no tenant can make a prompt
//                       whose blocks answer to another prompt's name.
//   xxh64 (XXH64)       checksums the bytes of a file: finds damage, at memory speed.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace millrace::kv {

// Incremental BLAKE2b with a digest of 1 to 64 bytes and no key.
class Blake2b {
 public:
  explicit Blake2b(size_t digest_bytes);
  void update(const void* data, size_t bytes);
  void update(std::string_view text) { update(text.data(), text.size()); }
  void finish(std::span<uint8_t> digest);  // digest.size() must be digest_bytes; once

 private:
  void compress(bool last);
  std::array<uint64_t, 8> h_;
  std::array<uint8_t, 128> buffer_;
  size_t filled_ = 0;
  uint64_t total_ = 0;
  size_t digest_bytes_;
};

uint64_t xxh64(std::span<const std::byte> data, uint64_t seed = 0);

// The name of a logical block (16 tokens): 128 bits of BLAKE2b over its parent's name and its tokens. The
// first block's parent is a root that stands for model, KV type, layout, salt and adapter.
struct BlockKey {
  std::array<uint8_t, 16> bytes{};
  auto operator<=>(const BlockKey&) const = default;
  uint64_t low() const {  // already uniform: good for a table
    uint64_t value;
    std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  std::string hex() const;
};

// `variant`: what of the model answers, an adapter's identity; empty: the model itself.
BlockKey root_key(std::string_view identity, std::string_view salt, std::string_view variant = {});
BlockKey child_key(const BlockKey& parent, std::span<const int32_t> tokens);

}  // namespace millrace::kv
