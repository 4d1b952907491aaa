// The spreading of the class ranges.
#include "tokenizer/unicode.h"

#include <fmt/core.h>

#include <algorithm>

#include "tokenizer/unicode_tables.h"

namespace millrace {

CodePointTable::CodePointTable(const uint32_t* ranges, size_t num_ranges) {
  // One shared block per value that fills whole blocks; the others follow in order.
  std::array<int32_t, 256> uniform;
  uniform.fill(-1);
  size_t r = 0;
  for (size_t block = 0; block < index_.size(); ++block) {
    std::array<uint8_t, 256> values;
    for (size_t i = 0; i < 256; ++i) {
      const uint32_t c = static_cast<uint32_t>(block * 256 + i);
      while (r + 1 < num_ranges && ranges[r + 1] >> 8 <= c) ++r;
      values[i] = static_cast<uint8_t>(ranges[r] & 0xff);
    }
    const bool same = std::all_of(values.begin(), values.end(), [&](uint8_t v) { return v == values[0]; });
    if (same && uniform[values[0]] >= 0) {
      index_[block] = static_cast<uint16_t>(uniform[values[0]]);
      continue;
    }
    index_[block] = static_cast<uint16_t>(blocks_.size() / 256);
    if (same) uniform[values[0]] = index_[block];
    blocks_.insert(blocks_.end(), values.begin(), values.end());
  }
}

void CodePointTable::set(uint32_t code_point, uint8_t value) {
  const size_t block = code_point >> 8;
  // A block of its own the first time, unless nobody else has it.
  if (std::count(index_.begin(), index_.end(), index_[block]) > 1) {
    const std::vector<uint8_t> copy(blocks_.begin() + index_[block] * 256,
                                    blocks_.begin() + index_[block] * 256 + 256);
    index_[block] = static_cast<uint16_t>(blocks_.size() / 256);
    blocks_.insert(blocks_.end(), copy.begin(), copy.end());
  }
  blocks_[static_cast<size_t>(index_[block]) << 8 | (code_point & 0xff)] = value;
}

const CodePointTable& char_flags_table() {
  static const CodePointTable table(kFlagRanges, kNumFlagRanges);
  return table;
}

const CodePointTable& symbol_table() {
  static const CodePointTable table(kSymbolRanges, kNumSymbolRanges);
  return table;
}

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (const char c : text.substr(0, max_bytes)) {
    if (c >= 0x20 && c <= 0x7e)
      out.push_back(c);
    else
      out += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
  }
  return text.size() > max_bytes ? out + "..." : out;
}

}  // namespace millrace
