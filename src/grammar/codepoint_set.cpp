#include "grammar/codepoint_set.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.h"
#include "base/utf8.h"

namespace millrace::grammar {
namespace {

constexpr uint32_t kFirstSurrogate = 0xd800, kLastSurrogate = 0xdfff;

// The range's characters all have `length` bytes.
void split_sequence(uint32_t first, uint32_t last, int length, std::vector<Utf8Sequence>& out) {
  // A sequence is a product of byte ranges only when every byte after the first that differs spans 80..BF.
  for (int i = 1; i < length; ++i) {
    const uint32_t tail = (1u << (6 * i)) - 1;
    if ((first & ~tail) == (last & ~tail)) continue;
    if ((first & tail) != 0) {
      split_sequence(first, first | tail, length, out);
      split_sequence((first | tail) + 1, last, length, out);
      return;
    }
    if ((last & tail) != tail) {
      split_sequence(first, (last & ~tail) - 1, length, out);
      split_sequence(last & ~tail, last, length, out);
      return;
    }
  }
  std::string low, high;
  append_utf8(low, first);
  append_utf8(high, last);
  Utf8Sequence sequence;
  sequence.length = length;
  for (int i = 0; i < length; ++i) {
    sequence.bytes[i] = {static_cast<uint8_t>(low[i]), static_cast<uint8_t>(high[i])};
  }
  out.push_back(sequence);
}

}  // namespace

CodepointSet CodepointSet::of(std::u32string_view characters) {
  CodepointSet set;
  for (const char32_t c : characters) set.ranges_.push_back({c, c});
  set.normalize();
  return set;
}

void CodepointSet::normalize() {
  std::vector<CodepointRange> parts;
  for (const CodepointRange& range : ranges_) {
    const uint32_t last = std::min(range.last, kLastCodepoint);
    if (range.first < kFirstSurrogate && range.first <= last)
      parts.push_back({range.first, std::min(last, kFirstSurrogate - 1)});
    if (last > kLastSurrogate && range.first <= last)
      parts.push_back({std::max(range.first, kLastSurrogate + 1), last});
  }
  std::sort(parts.begin(), parts.end(),
            [](const CodepointRange& a, const CodepointRange& b) { return a.first < b.first; });
  ranges_.clear();
  for (const CodepointRange& part : parts) {
    if (!ranges_.empty() && part.first <= ranges_.back().last + 1) {
      ranges_.back().last = std::max(ranges_.back().last, part.last);
    } else {
      ranges_.push_back(part);
    }
  }
}

void CodepointSet::add(uint32_t first, uint32_t last) {
  ranges_.push_back({first, last});
  normalize();
}

void CodepointSet::add(const CodepointSet& other) {
  ranges_.insert(ranges_.end(), other.ranges_.begin(), other.ranges_.end());
  normalize();
}

CodepointSet CodepointSet::complement() const {
  CodepointSet result;
  uint32_t next = 0;
  for (const CodepointRange& range : ranges_) {
    if (range.first > next) result.ranges_.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCodepoint) result.ranges_.push_back({next, kLastCodepoint});
  result.normalize();
  return result;
}

CodepointSet CodepointSet::intersection(const CodepointSet& other) const {
  CodepointSet result;
  size_t i = 0, j = 0;
  while (i < ranges_.size() && j < other.ranges_.size()) {
    const CodepointRange &a = ranges_[i], &b = other.ranges_[j];
    const uint32_t first = std::max(a.first, b.first), last = std::min(a.last, b.last);
    if (first <= last) result.ranges_.push_back({first, last});
    (a.last < b.last ? i : j)++;
  }
  return result;
}

bool CodepointSet::contains(uint32_t codepoint) const {
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const CodepointRange& range) {
    return range.first <= codepoint && codepoint <= range.last;
  });
}

void append_utf8_sequences(CodepointRange range, std::vector<Utf8Sequence>& out) {
  constexpr uint32_t kLastOfLength[] = {0x7f, 0x7ff, 0xffff, kLastCodepoint};
  uint32_t first = range.first;
  for (int length = 1; length <= 4 && first <= range.last; ++length) {
    const uint32_t last = std::min(range.last, kLastOfLength[length - 1]);
    if (first > last) continue;
    split_sequence(first, last, length, out);
    first = last + 1;
  }
}

uint32_t next_codepoint(std::string_view text, size_t& pos, std::string_view what) {
  size_t length = utf8_sequence_length(text.substr(pos));
  if (length == 0) {
    throw_error(
        ErrorCode::kBadInput, "{}: offset {}: found {}, expected UTF-8", what, pos,
        pos < text.size() ? fmt::format("byte {:#04x}", static_cast<unsigned char>(text[pos])) : "the end");
  }
  const uint32_t codepoint = decode_valid_utf8(text.data() + pos, length);
  pos += length;
  return codepoint;
}

}  // namespace millrace::grammar
