// UTF-8 in the strict sense of the standard's table 3-7: no overlongs, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace millrace {

// Length of the well-formed UTF-8 sequence at the start of text (no overlongs, surrogates or numbers above
// 0x10ffff), 0 when there is none.
size_t utf8_sequence_length(std::string_view text);
// How many bytes at the start of text are well-formed UTF-8.
size_t valid_utf8_prefix(std::string_view text);
// Bytes at the end of text that begin a sequence which more bytes could complete.
size_t incomplete_utf8_suffix(std::string_view text);
// Every maximal ill-formed part becomes one U+FFFD, as Rust's from_utf8_lossy and Python's "replace" do: JSON
// and templates take nothing else.
std::string valid_utf8(std::string_view text);
void append_utf8(std::string& out, uint32_t code_point);

// Decodes one character of text known to be well-formed.
inline uint32_t decode_valid_utf8(const char* p, size_t& length) {
  const auto b = [p](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(p[i])); };
  const uint32_t lead = b(0);
  if (lead < 0x80) {
    length = 1;
    return lead;
  }
  if (lead < 0xe0) {
    length = 2;
    return (lead & 0x1f) << 6 | (b(1) & 0x3f);
  }
  if (lead < 0xf0) {
    length = 3;
    return (lead & 0xf) << 12 | (b(1) & 0x3f) << 6 | (b(2) & 0x3f);
  }
  length = 4;
  return (lead & 7) << 18 | (b(1) & 0x3f) << 12 | (b(2) & 0x3f) << 6 | (b(3) & 0x3f);
}

}  // namespace millrace
