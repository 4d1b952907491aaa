// Added and special tokens: found in the text before anything else, leftmost and longest first, with the
// stripping options of Hugging Face's added_tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

struct AddedToken {
  uint32_t id = 0;
  std::string content;
  bool single_word = false;  // not inside a longer word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space behind it
  bool normalized = false;   // looked for in the normalized text
  bool special = false;      // not looked for when the text is to be taken literally; not shown when decoding
};

class AddedTokenMatcher {
 public:
  // The longest content it accepts: a bound on the work per byte of text.
  static constexpr size_t kMaxContentBytes = 1024;

  // `contents` are what is looked for, one per token (normalized ones differ from the token's own content).
  AddedTokenMatcher() = default;
  AddedTokenMatcher(const std::vector<AddedToken>& tokens, const std::vector<std::string>& contents);
  bool empty() const { return patterns_.empty(); }

  struct Piece {
    int64_t id;  // -1: ordinary text
    std::string_view text;
  };
  // Cuts the text; pieces of ordinary text are never empty.
  void split(std::string_view text, bool parse_special, std::vector<Piece>& pieces) const;

 private:
  struct Pattern {
    std::string content;
    AddedToken token;
  };
  const Pattern* longest_at(std::string_view text) const;

  std::vector<Pattern> patterns_;              // sorted by content
  std::array<uint32_t, 257> first_of_byte_{};  // patterns that begin with byte b: [first[b], first[b + 1])
};

}  // namespace millrace
