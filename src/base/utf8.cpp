#include "base/utf8.h"

#include <algorithm>
#include <cstring>

namespace millrace {
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

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (true) {
    const size_t valid = valid_utf8_prefix(text);
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return out;
    const Lead lead = lead_of(static_cast<uint8_t>(text[0]));
    text.remove_prefix(lead.length == 0 ? 1 : matching_bytes(text, lead));
    out += "\xef\xbf\xbd";
  }
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
