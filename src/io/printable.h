// Text from a file made fit for a one-line message: quotes around it, control and non-ASCII bytes as \xNN,
// long text cut short.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace millrace::io {

inline std::string printable(std::string_view text, size_t max_chars = 80) {
  std::string out = "'";
  for (const char c : text.substr(0, max_chars)) {
    if (c >= 0x20 && c < 0x7f) {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  out += text.size() > max_chars ? "...'" : "'";
  return out;
}

}  // namespace millrace::io
