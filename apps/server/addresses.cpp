#include "addresses.h"

#include <arpa/inet.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

namespace millrace::server {
namespace {

// IPv4 as the IPv6 address that stands for it, ::ffff:a.b.c.d.
using AddressBytes = std::array<uint8_t, 16>;
constexpr AddressBytes kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0};

std::optional<AddressBytes> address_bytes(std::string_view text) {
  const std::string zero_ended(text.substr(0, text.find('%')));  // without the interface: fe80::1%eth0
  AddressBytes bytes = kMapped;
  if (::inet_pton(AF_INET, zero_ended.c_str(), bytes.data() + 12) == 1) return bytes;
  if (::inet_pton(AF_INET6, zero_ended.c_str(), bytes.data()) == 1) return bytes;
  return std::nullopt;
}

bool is_mapped(const AddressBytes& b) { return std::equal(b.begin(), b.begin() + 12, kMapped.begin()); }

bool only_last(const AddressBytes& b, uint8_t last) {
  return std::all_of(b.begin(), b.end() - 1, [](uint8_t x) { return x == 0; }) && b.back() == last;
}

}  // namespace

bool is_address(std::string_view text) { return address_bytes(text).has_value(); }

bool is_loopback_address(std::string_view text) {
  const auto b = address_bytes(text);
  return b && (is_mapped(*b) ? (*b)[12] == 127 : only_last(*b, 1));
}

bool is_private_address(std::string_view text) {
  const auto b = address_bytes(text);
  if (!b) return false;
  if (is_loopback_address(text)) return true;
  if (!is_mapped(*b)) return ((*b)[0] & 0xfe) == 0xfc || ((*b)[0] == 0xfe && ((*b)[1] & 0xc0) == 0x80);
  const uint8_t first = (*b)[12], second = (*b)[13];
  return first == 10 || (first == 172 && (second & 0xf0) == 16) || (first == 192 && second == 168) ||
         (first == 169 && second == 254) || (first == 100 && (second & 0xc0) == 64);
}

bool is_any_address(std::string_view text) {
  const auto b = address_bytes(text);
  return b && (only_last(*b, 0) ||
               (is_mapped(*b) && std::all_of(b->begin() + 12, b->end(), [](uint8_t x) { return x == 0; })));
}

std::string address_group(std::string_view text) {
  const auto b = address_bytes(text);
  if (!b) return std::string(text);
  if (is_mapped(*b)) return fmt::format("{}.{}.{}.{}", (*b)[12], (*b)[13], (*b)[14], (*b)[15]);
  std::string group;
  for (size_t i = 0; i < 8; i += 2) group += fmt::format("{:x}:", (*b)[i] << 8 | (*b)[i + 1]);
  return group + ":/64";
}

}  // namespace millrace::server
