#include "kv/block_file.h"

#include <fmt/core.h>

#include <charconv>
#include <cstring>
#include <string_view>

#include "kv/compressor.h"

namespace millrace::kv {
namespace {

// As on disk, little-endian; no padding between the fields.
struct Header {
  char magic[8];
  uint32_t version, header_bytes;
  uint8_t key[16], parent[16];
  int32_t group, index;
  uint32_t element_bytes, reserved;  // 0: plain; else compressed, planes split by this
  uint64_t raw_bytes, stored_bytes;
  uint64_t payload_sum;  // xxh64 of the stored bytes
  int32_t tokens[kBlockTokens];
  uint64_t unused[2];
  uint64_t header_sum;  // xxh64 of everything before it
};
static_assert(sizeof(Header) == kFileHeaderBytes && offsetof(Header, header_sum) == kFileHeaderBytes - 8);
constexpr char kMagic[8] = {'M', 'R', 'K', 'V', 'B', 'L', 'K', '\n'};

uint64_t sum_of(const Header& header) {
  return xxh64(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_sum)));
}

std::string fault_of(const Header& header) {
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return "magic: expected MRKVBLK";
  if (header.version != kFileVersion || header.header_bytes != sizeof(Header)) {
    return fmt::format("version: found {}, expected {}", header.version, kFileVersion);
  }
  if (header.header_sum != sum_of(header)) return "header checksum: does not match";
  return {};
}

std::string fault_of(const Header& header, const BlockLabel& label, size_t file_bytes) {
  if (std::string fault = fault_of(header); !fault.empty()) return fault;
  if (std::memcmp(header.key, label.key.bytes.data(), sizeof(header.key)) != 0 ||
      header.group != label.group || header.index != label.index) {
    return "name: found another block's";
  }
  if (std::memcmp(header.parent, label.parent.bytes.data(), sizeof(header.parent)) != 0 ||
      std::memcmp(header.tokens, label.tokens.data(), sizeof(header.tokens)) != 0) {
    return "tokens: found another prompt's";
  }
  if (header.raw_bytes != label.raw_bytes ||
      (header.element_bytes == 0 && header.stored_bytes != label.raw_bytes)) {
    return fmt::format("size: found a block of {} bytes, expected {}", header.raw_bytes, label.raw_bytes);
  }
  if (file_bytes - sizeof(Header) != header.stored_bytes) {
    return fmt::format("payload: found {} bytes, expected {}", file_bytes - sizeof(Header),
                       header.stored_bytes);
  }
  return {};
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string file_name(const BlockKey& key, int group, int32_t index) {
  return fmt::format("{}-{}-{}.kv{}", key.hex(), group, index, kFileVersion);
}

std::optional<FileName> parse_file_name(const std::string& name) {
  if (name.size() < 40 || name[32] != '-' || name[34] != '-') return {};
  FileName parsed;
  for (size_t i = 0; i < 16; ++i) {
    const int high = hex_value(name[2 * i]), low = hex_value(name[2 * i + 1]);
    if (high < 0 || low < 0) return {};
    parsed.key.bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  parsed.group = name[33] - '0';
  if (parsed.group < 0 || parsed.group >= kMaxKvGroups) return {};
  const char* at = name.data() + 35;
  const char* const end = name.data() + name.size();
  auto result = std::from_chars(at, end, parsed.index);
  if (result.ec != std::errc() || parsed.index < 0) return {};
  at = result.ptr;
  if (std::string_view(at, static_cast<size_t>(end - at)).substr(0, 3) != ".kv") return {};
  result = std::from_chars(at + 3, end, parsed.version);
  if (result.ec != std::errc() || result.ptr != end) return {};
  return parsed;
}

std::array<std::byte, kFileHeaderBytes> encode_header(const BlockLabel& label, size_t element_bytes,
                                                      std::span<const std::byte> payload) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kFileVersion;
  header.header_bytes = sizeof(Header);
  std::memcpy(header.key, label.key.bytes.data(), sizeof(header.key));
  std::memcpy(header.parent, label.parent.bytes.data(), sizeof(header.parent));
  header.group = label.group;
  header.index = label.index;
  header.element_bytes = static_cast<uint32_t>(element_bytes);
  header.raw_bytes = label.raw_bytes;
  header.stored_bytes = payload.size();
  header.payload_sum = xxh64(payload);
  std::memcpy(header.tokens, label.tokens.data(), sizeof(header.tokens));
  header.header_sum = sum_of(header);
  std::array<std::byte, kFileHeaderBytes> bytes;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

std::optional<BlockLabel> decode_header(std::span<const std::byte> file) {
  Header header;
  if (file.size() < sizeof(header)) return {};
  std::memcpy(&header, file.data(), sizeof(header));
  if (!fault_of(header).empty()) return {};
  BlockLabel label;
  label.group = header.group;
  label.index = header.index;
  label.raw_bytes = header.raw_bytes;
  std::memcpy(label.key.bytes.data(), header.key, sizeof(header.key));
  std::memcpy(label.parent.bytes.data(), header.parent, sizeof(header.parent));
  std::memcpy(label.tokens.data(), header.tokens, sizeof(header.tokens));
  if (child_key(label.parent, label.tokens) != label.key) return {};
  return label;
}

Decoded decode_file(const BlockLabel& expected, std::vector<std::byte> file) {
  Header header;
  if (file.size() < sizeof(header)) {
    return {nullptr, fmt::format("size: found {} bytes, expected at least {}", file.size(), sizeof(header))};
  }
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::string fault = fault_of(header, expected, file.size()); !fault.empty()) return {nullptr, fault};
  const std::span<const std::byte> payload = std::span(file).subspan(sizeof(header));
  if (xxh64(payload) != header.payload_sum) return {nullptr, "payload checksum: does not match"};
  if (header.element_bytes == 0) return {std::make_shared<Bytes>(std::move(file), sizeof(header)), {}};
  auto raw = std::make_shared<Bytes>(expected.raw_bytes);
  Bytes planes(expected.raw_bytes);
  if (!decompress(payload, planes.span())) return {nullptr, "payload: cannot be decompressed"};
  join_planes(planes.span(), header.element_bytes, raw->span());
  return {raw, {}};
}

}  // namespace millrace::kv
