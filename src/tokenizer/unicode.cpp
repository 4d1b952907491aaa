// UTF-8 in the strict sense of the standard's table 3-7, and the spreading of the class ranges.
#include "tokenizer/unicode.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

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

namespace {

// What the byte after a lead byte may be, and how long the sequence is; length 0: no lead byte.
struct Lead {
  size_t length;
  uint8_t low, high;
};

Lead lead_of(uint8_t b) {
  if (b < 0x80) return {1, 0, 0};
  if (b < 0xc2) return {0, 0, 0};
  if (b < 0xe0) return {2, 0x80, 0xbf};
  if (b == 0xe0) return {3, 0xa0, 0xbf};
  if (b == 0xed) return {3, 0x80, 0x9f};
  if (b < 0xf0) return {3, 0x80, 0xbf};
  if (b == 0xf0) return {4, 0x90, 0xbf};
  if (b < 0xf4) return {4, 0x80, 0xbf};
  if (b == 0xf4) return {4, 0x80, 0x8f};
  return {0, 0, 0};
}

// How many bytes of text agree with the sequence its first byte announces (at least 1).
size_t matching_bytes(std::string_view text, Lead lead) {
  size_t n = 1;
  for (; n < lead.length && n < text.size(); ++n) {
    const uint8_t b = static_cast<uint8_t>(text[n]);
    if (n == 1 ? (b < lead.low || b > lead.high) : (b & 0xc0) != 0x80) break;
  }
  return n;
}

}  // namespace

size_t utf8_sequence_length(std::string_view text) {
  if (text.empty()) return 0;
  const Lead lead = lead_of(static_cast<uint8_t>(text[0]));
  return lead.length != 0 && matching_bytes(text, lead) == lead.length ? lead.length : 0;
}

size_t valid_utf8_prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    uint64_t word;
    if (i + 8 <= text.size()) {
      std::memcpy(&word, text.data() + i, 8);
      if ((word & 0x8080808080808080u) == 0) {
        i += 8;
        continue;
      }
    }
    const size_t n = utf8_sequence_length(text.substr(i));
    if (n == 0) break;
    i += n;
  }
  return i;
}

size_t incomplete_utf8_suffix(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const std::string_view tail = text.substr(text.size() - back);
    if ((static_cast<uint8_t>(tail[0]) & 0xc0) == 0x80) continue;
    const Lead lead = lead_of(static_cast<uint8_t>(tail[0]));
    return lead.length > back && matching_bytes(tail, lead) == back ? back : 0;
  }
  return 0;
}

std::string utf8_lossy(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (true) {
    const size_t valid = valid_utf8_prefix(bytes);
    out.append(bytes.substr(0, valid));
    bytes.remove_prefix(valid);
    if (bytes.empty()) return out;
    const Lead lead = lead_of(static_cast<uint8_t>(bytes[0]));
    bytes.remove_prefix(lead.length == 0 ? 1 : matching_bytes(bytes, lead));
    out += "\xef\xbf\xbd";
  }
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

void append_utf8(std::string& out, uint32_t c) {
  const auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | c >> 6);
    put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3f));
    put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

}  // namespace millrace
