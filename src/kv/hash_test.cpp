#include "kv/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace millrace::kv {
namespace {

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string blake2b(std::string_view text, size_t digest_bytes, size_t piece = 1000) {
  Blake2b hash(digest_bytes);
  for (size_t at = 0; at < text.size(); at += piece) hash.update(text.substr(at, piece));
  std::vector<uint8_t> digest(digest_bytes);
  hash.finish(digest);
  return hex(digest);
}

TEST(Blake2b, PublishedVectors) {
  // RFC 7693, appendix A, and the empty input of the reference implementation's test file.
  EXPECT_EQ(blake2b("abc", 64),
            "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
            "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
  EXPECT_EQ(blake2b("", 64),
            "786a02f742015903c6c6fd852552d272912f4740e15847618a86e217f71f5419"
            "d25e1031afee585313896444934eb04b903a685b1448b755d56f701afe9be2ce");
  // Two blocks, a short digest: Python's hashlib.blake2b(bytes(range(256)), digest_size=16).
  std::string counting;
  for (int i = 0; i < 256; ++i) counting += static_cast<char>(i);
  EXPECT_EQ(blake2b(counting, 16), "c2472c0ac37a8dbdb25f05ada0d82643");
}

TEST(Blake2b, PiecesMakeNoDifference) {
  std::string text;
  uint32_t a = 0xDEAD4BAD * 1024u, b = 1;
  for (int i = 0; i < 1024; ++i) {
    const uint32_t t = a + b;
    a = b;
    b = t;
    text += static_cast<char>(t >> 24);
  }
  for (const size_t length : {0u, 1u, 127u, 128u, 129u, 255u, 256u, 257u, 1024u}) {
    const std::string_view part = std::string_view(text).substr(0, length);
    const std::string whole = blake2b(part, 16, 2000);
    for (const size_t piece : {1u, 7u, 127u, 128u, 129u, 300u}) EXPECT_EQ(blake2b(part, 16, piece), whole);
  }
}

TEST(Xxh64, PublishedVectors) {
  // xxHash's sanity buffer: byte_i = high byte of a 64-bit state multiplied by PRIME64.
  std::vector<std::byte> buffer(256);
  uint64_t state = 2654435761u;
  for (std::byte& byte : buffer) {
    byte = static_cast<std::byte>(state >> 56);
    state *= 11400714785074694797u;
  }
  const auto of = [&](size_t bytes, uint64_t seed) { return xxh64(std::span(buffer).first(bytes), seed); };
  const uint64_t prime = 2654435761u;
  EXPECT_EQ(of(0, 0), 0xEF46DB3751D8E999u);
  EXPECT_EQ(of(0, prime), 0xAC75FDA2929B17EFu);
  EXPECT_EQ(of(1, 0), 0xE934A84ADB052768u);
  EXPECT_EQ(of(4, 0), 0x9136A0DCA57457EEu);
  EXPECT_EQ(of(14, 0), 0x8282DCC4994E35C8u);
  EXPECT_EQ(of(14, prime), 0xC3BD6BF63DEB6DF0u);
  EXPECT_EQ(of(222, 0), 0xB641AE8CB691C174u);
  EXPECT_EQ(of(222, prime), 0x20CB8AB7AE10C14Au);
}

TEST(BlockKey, DependsOnEverything) {
  const std::vector<int32_t> tokens = {1, 2, 3}, others = {1, 2, 4};
  std::set<BlockKey> keys = {root_key("model", ""),
                             root_key("mode", "l"),
                             root_key("model", "salt"),
                             child_key(root_key("model", ""), tokens),
                             child_key(root_key("model", ""), others),
                             child_key(root_key("model", "salt"), tokens),
                             child_key(child_key(root_key("model", ""), tokens), tokens)};
  EXPECT_EQ(keys.size(), 7u);
  EXPECT_EQ(root_key("model", "").hex().size(), 32u);
}

}  // namespace
}  // namespace millrace::kv
