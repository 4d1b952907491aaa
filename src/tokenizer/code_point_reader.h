// What the scanners of the pre-tokenizers share: character classes of a range of text, and the alternatives
// that most expressions end with.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tokenizer/unicode.h"

namespace millrace {

inline const std::array<uint8_t, 128>& ascii_flags() {
  static const std::array<uint8_t, 128> flags = [] {
    std::array<uint8_t, 128> f;
    for (uint32_t c = 0; c < 128; ++c) f[c] = char_flags_table()[c];
    return f;
  }();
  return flags;
}

// \p{Han}
inline bool is_han(uint32_t c) {
  constexpr uint32_t kRanges[][2] = {
      {0x2e80, 0x2e99},   {0x2e9b, 0x2ef3},   {0x2f00, 0x2fd5},   {0x3005, 0x3005},   {0x3007, 0x3007},
      {0x3021, 0x3029},   {0x3038, 0x303b},   {0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xf900, 0xfa6d},
      {0xfa70, 0xfad9},   {0x16fe2, 0x16fe3}, {0x16ff0, 0x16ff1}, {0x20000, 0x2a6df}, {0x2a700, 0x2b739},
      {0x2b740, 0x2b81d}, {0x2b820, 0x2cea1}, {0x2ceb0, 0x2ebe0}, {0x2ebf0, 0x2ee5d}, {0x2f800, 0x2fa1d},
      {0x30000, 0x3134a}, {0x31350, 0x323af}};
  for (const auto& range : kRanges) {
    if (c <= range[1]) return c >= range[0];
  }
  return false;
}

// Character classes of one text range.
struct CodePointReader {
  const char* end;
  const uint8_t* ascii = ascii_flags().data();
  const CodePointTable& table = char_flags_table();
  bool han_apart = false;  // \p{Han} is neither kUpperish nor kLowerish (Kimi)

  uint8_t flags(const char* p, size_t& length) const {
    const uint8_t b = static_cast<uint8_t>(*p);
    if (b < 0x80) {
      length = 1;
      return ascii[b];
    }
    const uint32_t c = decode_valid_utf8(p, length);
    const uint8_t f = table[c];
    return han_apart && is_han(c) ? static_cast<uint8_t>(f & ~(kUpperish | kLowerish)) : f;
  }
  // Past the characters that have one of `any` and none of `none`.
  const char* skip(const char* p, uint8_t any, uint8_t none = 0) const {
    size_t n = 0;
    while (p < end) {
      const uint8_t f = flags(p, n);
      if ((f & any) == 0 || (f & none) != 0) break;
      p += n;
    }
    return p;
  }
  // Past the characters that have none of `none`.
  const char* skip_except(const char* p, uint8_t none) const {
    size_t n = 0;
    while (p < end && (flags(p, n) & none) == 0) p += n;
    return p;
  }
};

// \s*[\r\n]+|\s+(?!\S)|\s+ with newlines, \s+(?!\S)|\s+ without, at a white space character.
inline const char* scan_space(const CodePointReader& reader, const char* begin, bool newlines) {
  const char* p = begin;
  const char* last = begin;  // start of the last white space character
  const char* after_newline = nullptr;
  size_t n = 0;
  while (p < reader.end) {
    const uint8_t f = reader.flags(p, n);
    if ((f & kSpace) == 0) break;
    last = p;
    p += n;
    if ((f & kNewline) != 0) after_newline = p;
  }
  if (newlines && after_newline != nullptr) return after_newline;
  return p == reader.end || last == begin ? p : last;
}

// \p{N}{1,max}
inline const char* scan_number_group(const CodePointReader& reader, const char* p, int max) {
  size_t n = 0;
  for (int i = 0; i < max && p < reader.end && (reader.flags(p, n) & kNumber) != 0; ++i) p += n;
  return p;
}

}  // namespace millrace
