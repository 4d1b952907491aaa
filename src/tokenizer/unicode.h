// UTF-8 and the character classes that the pre-tokenizers' regular expressions name (Unicode 16.0).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

// The order is that of tools/make_unicode_tables.py.
enum CharFlags : uint8_t {
  kLetter = 1,        // \p{L}
  kNumber = 2,        // \p{N}
  kSpace = 4,         // \s
  kUpperish = 8,      // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
  kLowerish = 16,     // [\p{Ll}\p{Lm}\p{Lo}\p{M}]
  kNewline = 32,      // [\r\n]
  kPunctuation = 64,  // \p{P}
  kWordChar = 128,    // \w
};

// A byte per code point, in blocks of 256 that are shared where they are alike.
class CodePointTable {
 public:
  CodePointTable(const uint32_t* ranges, size_t num_ranges);
  uint8_t operator[](uint32_t code_point) const {  // code_point < 0x110000
    return blocks_[static_cast<size_t>(index_[code_point >> 8]) << 8 | (code_point & 0xff)];
  }
  void set(uint32_t code_point, uint8_t value);

 private:
  std::array<uint16_t, 0x1100> index_;
  std::vector<uint8_t> blocks_;
};

const CodePointTable& char_flags_table();

// Length of the well-formed UTF-8 sequence at the start of text (no overlongs, surrogates or numbers above
// 0x10ffff), 0 when there is none.
size_t utf8_sequence_length(std::string_view text);
// How many bytes at the start of text are well-formed UTF-8.
size_t valid_utf8_prefix(std::string_view text);
// Bytes at the end of text that begin a sequence which more bytes could complete.
size_t incomplete_utf8_suffix(std::string_view text);
// Every maximal ill-formed part becomes one U+FFFD, as Rust's from_utf8_lossy and Python's "replace" do.
std::string utf8_lossy(std::string_view bytes);
// For messages: one line of printable ASCII, other bytes as \xNN, cut off behind max_bytes.
std::string printable(std::string_view text, size_t max_bytes = 80);
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
