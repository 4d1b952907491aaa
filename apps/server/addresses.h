// IP addresses as text: which of them are this machine, which a private network, and which count as one
// client.
#pragma once

#include <string>
#include <string_view>

namespace millrace::server {

bool is_address(std::string_view text);           // IPv4 or IPv6, without brackets
bool is_loopback_address(std::string_view text);  // 127.0.0.0/8, ::1
// Loopback, 10/8, 172.16/12, 192.168/16, 169.254/16, 100.64/10, fc00::/7, fe80::/10: where a proxy of one's
// own is.
bool is_private_address(std::string_view text);
bool is_any_address(std::string_view text);  // 0.0.0.0 or ::
// Addresses that one subscriber has at once: an IPv4 address, or the /64 of an IPv6 address.
std::string address_group(std::string_view text);

}  // namespace millrace::server
