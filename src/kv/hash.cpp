#include "kv/hash.h"

#include <bit>

#include "base/check.h"

namespace millrace::kv {
namespace {

static_assert(std::endian::native == std::endian::little,
              "both hashes read words as the machine stores them");

uint64_t load64(const void* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint32_t load32(const void* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// ---------------------------------------------------------------- BLAKE2b, RFC 7693

constexpr std::array<uint64_t, 8> kBlakeStart = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                                 0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                                 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t kBlakeOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                         {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                         {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                         {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                         {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                         {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                         {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                         {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                         {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

}  // namespace

Blake2b::Blake2b(size_t digest_bytes) : h_(kBlakeStart), digest_bytes_(digest_bytes) {
  MILLRACE_CHECK(digest_bytes >= 1 && digest_bytes <= 64);
  h_[0] ^= 0x01010000 ^ digest_bytes;  // no key, one leaf
}

void Blake2b::compress(bool last) {
  std::array<uint64_t, 16> v, m;
  for (size_t i = 0; i < 8; ++i) {
    v[i] = h_[i];
    v[i + 8] = kBlakeStart[i];
  }
  v[12] ^= total_;  // its high word would count past 2^64 bytes
  if (last) v[14] = ~v[14];
  for (size_t i = 0; i < 16; ++i) m[i] = load64(&buffer_[8 * i]);
  for (int round = 0; round < 12; ++round) {
    const uint8_t* s = kBlakeOrder[round % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  }
  for (size_t i = 0; i < 8; ++i) h_[i] ^= v[i] ^ v[i + 8];
}

void Blake2b::update(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    if (filled_ == buffer_.size()) {  // only when more follows: the last block is finish()'s
      total_ += filled_;
      compress(false);
      filled_ = 0;
    }
    const size_t part = std::min(bytes, buffer_.size() - filled_);
    std::memcpy(&buffer_[filled_], from, part);
    filled_ += part;
    from += part;
    bytes -= part;
  }
}

void Blake2b::finish(std::span<uint8_t> digest) {
  MILLRACE_CHECK(digest.size() == digest_bytes_);
  total_ += filled_;
  std::memset(buffer_.data() + filled_, 0, buffer_.size() - filled_);
  compress(true);
  std::memcpy(digest.data(), h_.data(), digest.size());
}

// ---------------------------------------------------------------- XXH64

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

uint64_t xxh_round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kPrime2, 31) * kPrime1; }

}  // namespace

uint64_t xxh64(std::span<const std::byte> data, uint64_t seed) {
  const std::byte* p = data.data();
  size_t left = data.size();
  uint64_t h = seed + kPrime5;
  if (left >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= 32; left -= 32, p += 32) {
      for (int i = 0; i < 4; ++i) lanes[i] = xxh_round(lanes[i], load64(p + 8 * i));
    }
    h = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) h = (h ^ xxh_round(0, lane)) * kPrime1 + kPrime4;
  }
  h += data.size();
  for (; left >= 8; left -= 8, p += 8) h = std::rotl(h ^ xxh_round(0, load64(p)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    h = std::rotl(h ^ load32(p) * kPrime1, 23) * kPrime2 + kPrime3;
    left -= 4;
    p += 4;
  }
  for (; left > 0; --left, ++p) h = std::rotl(h ^ static_cast<uint64_t>(*p) * kPrime5, 11) * kPrime1;
  h = (h ^ h >> 33) * kPrime2;
  h = (h ^ h >> 29) * kPrime3;
  return h ^ h >> 32;
}

// ---------------------------------------------------------------- names of blocks

std::string BlockKey::hex() const {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

BlockKey root_key(std::string_view identity, std::string_view salt, std::string_view variant) {
  Blake2b hash(sizeof(BlockKey::bytes));
  const uint64_t sizes[2] = {identity.size(), salt.size()};  // so that no byte can change sides
  hash.update(sizes, sizeof(sizes));
  hash.update(identity);
  hash.update(salt);
  hash.update(variant);  // the rest, whatever its size
  BlockKey key;
  hash.finish(key.bytes);
  return key;
}

BlockKey child_key(const BlockKey& parent, std::span<const int32_t> tokens) {
  Blake2b hash(sizeof(BlockKey::bytes));
  hash.update(parent.bytes.data(), parent.bytes.size());
  hash.update(tokens.data(), tokens.size_bytes());
  BlockKey key;
  hash.finish(key.bytes);
  return key;
}

}  // namespace millrace::kv
