// Sets of Unicode characters as sorted ranges, and how a range is written in UTF-8. Surrogates are no
// characters: no set holds them, so that whatever a set leads to is valid UTF-8.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace::grammar {

constexpr uint32_t kLastCodepoint = 0x10ffff;

struct CodepointRange {
  uint32_t first = 0, last = 0;
  bool operator==(const CodepointRange&) const = default;
};

class CodepointSet {
 public:
  CodepointSet() = default;
  CodepointSet(uint32_t first, uint32_t last) { add(first, last); }
  static CodepointSet all() { return {0, kLastCodepoint}; }
  static CodepointSet of(std::u32string_view characters);

  void add(uint32_t first, uint32_t last);
  void add(const CodepointSet& other);
  CodepointSet complement() const;
  CodepointSet intersection(const CodepointSet& other) const;
  bool contains(uint32_t codepoint) const;
  bool contains(const CodepointSet& other) const { return intersection(other) == other; }
  bool empty() const { return ranges_.empty(); }
  const std::vector<CodepointRange>& ranges() const { return ranges_; }  // sorted, apart from one another
  bool operator==(const CodepointSet&) const = default;

 private:
  void normalize();
  std::vector<CodepointRange> ranges_;
};

struct ByteRange {
  uint8_t first = 0, last = 0;
};

// One byte range per place: every combination is a character, and all have the same length.
struct Utf8Sequence {
  std::array<ByteRange, 4> bytes = {};
  int length = 0;
};

void append_utf8_sequences(CodepointRange range, std::vector<Utf8Sequence>& out);
// The character at `pos`, which moves past it; what is not UTF-8 throws Error{kBadInput} naming `what`.
uint32_t next_codepoint(std::string_view text, size_t& pos, std::string_view what);

}  // namespace millrace::grammar
