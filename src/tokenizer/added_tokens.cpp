// Matching searches the sorted contents: all that share the text's first bytes are neighbours, and each
// further byte narrows the range.
#include "tokenizer/added_tokens.h"

#include <algorithm>

#include "tokenizer/unicode.h"

namespace millrace {
namespace {

// Flags of the character that begins, or ends, a text; 0 for none and for bytes that are no UTF-8.
uint8_t first_flags(std::string_view text) {
  size_t n = utf8_sequence_length(text);
  return n == 0 ? uint8_t{0} : char_flags_table()[decode_valid_utf8(text.data(), n)];
}

size_t last_char_length(std::string_view text) {
  for (size_t n = 1; n <= std::min<size_t>(4, text.size()); ++n)
    if (utf8_sequence_length(text.substr(text.size() - n)) == n) return n;
  return 0;
}

uint8_t last_flags(std::string_view text) {
  return first_flags(text.substr(text.size() - last_char_length(text)));
}

bool stands_alone(std::string_view text, size_t begin, size_t end) {
  return (last_flags(text.substr(0, begin)) & kWordChar) == 0 &&
         (first_flags(text.substr(end)) & kWordChar) == 0;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(const std::vector<AddedToken>& tokens,
                                     const std::vector<std::string>& contents) {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (!contents[i].empty()) patterns_.push_back({contents[i], tokens[i]});
  std::stable_sort(patterns_.begin(), patterns_.end(),
                   [](const Pattern& a, const Pattern& b) { return a.content < b.content; });
  for (const Pattern& p : patterns_) ++first_of_byte_[static_cast<uint8_t>(p.content[0]) + 1u];
  for (size_t b = 0; b < 256; ++b) first_of_byte_[b + 1] += first_of_byte_[b];
}

const AddedTokenMatcher::Pattern* AddedTokenMatcher::longest_at(std::string_view text) const {
  const uint8_t byte = static_cast<uint8_t>(text[0]);
  size_t low = first_of_byte_[byte];
  size_t high = first_of_byte_[byte + 1u];
  const Pattern* best = nullptr;
  for (size_t depth = 1; low < high; ++depth) {
    // [low, high) share the text's first `depth` bytes; one that is no longer than that is the first of them.
    if (patterns_[low].content.size() == depth) {
      best = &patterns_[low];
      while (low < high && patterns_[low].content.size() == depth) ++low;
    }
    if (depth >= text.size()) break;
    const uint8_t next = static_cast<uint8_t>(text[depth]);
    const auto first = patterns_.begin() + static_cast<std::ptrdiff_t>(low);
    const auto last = patterns_.begin() + static_cast<std::ptrdiff_t>(high);
    const auto less = [depth](const Pattern& p, uint8_t b) {
      return static_cast<uint8_t>(p.content[depth]) < b;
    };
    const auto more = [depth](uint8_t b, const Pattern& p) {
      return b < static_cast<uint8_t>(p.content[depth]);
    };
    low = static_cast<size_t>(std::lower_bound(first, last, next, less) - patterns_.begin());
    high = static_cast<size_t>(std::upper_bound(first, last, next, more) - patterns_.begin());
  }
  return best;
}

void AddedTokenMatcher::split(std::string_view text, bool parse_special, std::vector<Piece>& pieces) const {
  size_t done = 0;  // up to here the text is in pieces
  for (size_t i = 0; i < text.size();) {
    const uint8_t byte = static_cast<uint8_t>(text[i]);
    const Pattern* match =
        first_of_byte_[byte] < first_of_byte_[byte + 1u] ? longest_at(text.substr(i)) : nullptr;
    if (match == nullptr) {
      ++i;
      continue;
    }
    size_t begin = i;
    size_t end = i + match->content.size();
    i = end;  // a match that is refused below is passed over whole, as Hugging Face does
    const AddedToken& token = match->token;
    if (token.special && !parse_special) continue;
    if (token.single_word && !stands_alone(text, begin, end)) continue;
    if (token.lstrip) {
      while (begin > done && (last_flags(text.substr(done, begin - done)) & kSpace) != 0)
        begin -= last_char_length(text.substr(done, begin - done));
    }
    if (token.rstrip) {
      while (end < text.size() && (first_flags(text.substr(end)) & kSpace) != 0)
        end += utf8_sequence_length(text.substr(end));
    }
    begin = std::max(begin, done);
    if (done < begin) pieces.push_back({-1, text.substr(done, begin - done)});
    pieces.push_back({token.id, text.substr(begin, end - begin)});
    done = end;
    i = std::max(i, std::min(end, text.size()));
  }
  if (done < text.size()) pieces.push_back({-1, text.substr(done)});
}

}  // namespace millrace
