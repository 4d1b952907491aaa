// The character classes that the pre-tokenizers' regular expressions name (Unicode 16.0).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"

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
const CodePointTable& symbol_table();  // 1: \p{S}

// For messages: one line of printable ASCII, other bytes as \xNN, cut off behind max_bytes.
std::string printable(std::string_view text, size_t max_bytes = 80);

}  // namespace millrace
