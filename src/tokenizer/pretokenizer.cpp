// The expressions are ordered alternations with backtracking. Each function tries the alternatives in that
// order from one position; all of them are linear because a run once measured is consumed whole.
#include "tokenizer/pretokenizer.h"

#include <array>

#include "tokenizer/unicode.h"

namespace millrace {
namespace {

constexpr uint8_t kLetterNumber = kLetter | kNumber;
constexpr uint8_t kLetterNumberSpace = kLetter | kNumber | kSpace;

const std::array<uint8_t, 128>& ascii_flags() {
  static const std::array<uint8_t, 128> flags = [] {
    std::array<uint8_t, 128> f;
    for (uint32_t c = 0; c < 128; ++c) f[c] = char_flags_table()[c];
    return f;
  }();
  return flags;
}

// Character classes of one text range.
struct CodePointReader {
  const char* end;
  const uint8_t* ascii = ascii_flags().data();
  const CodePointTable& table = char_flags_table();

  uint8_t flags(const char* p, size_t& length) const {
    const uint8_t b = static_cast<uint8_t>(*p);
    if (b < 0x80) {
      length = 1;
      return ascii[b];
    }
    return table[decode_valid_utf8(p, length)];
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

// Length of 's 't 're 've 'm 'll 'd at p, 0 when there is none. Without regard to case, 's is also written
// with the long s (U+017F), whose capital is S.
size_t contraction(const char* p, const char* end, bool ignore_case) {
  if (end - p < 2 || *p != '\'') return 0;
  const auto lower = [ignore_case](char c) {
    return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  const char a = lower(p[1]);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if (end - p < 3) return 0;
  if (ignore_case && p[1] == '\xc5' && p[2] == '\xbf') return 3;
  const char b = lower(p[2]);
  return (b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l') ? 3 : 0;
}

// \s*[\r\n]+|\s+(?!\S)|\s+ with newlines, \s+(?!\S)|\s+ without, at a white space character.
const char* scan_space(const CodePointReader& reader, const char* begin, bool newlines) {
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
const char* scan_number_group(const CodePointReader& reader, const char* p, int max) {
  size_t n = 0;
  for (int i = 0; i < max && p < reader.end && (reader.flags(p, n) & kNumber) != 0; ++i) p += n;
  return p;
}

// (?i:'s|...)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
const char* scan_cl100k(const char* begin, const char* end, int max_digits) {
  const CodePointReader reader{end};
  if (const size_t n = contraction(begin, end, true)) return begin + n;
  size_t n = 0;
  const uint8_t first = reader.flags(begin, n);
  if ((first & kLetter) != 0) return reader.skip(begin + n, kLetter);
  if ((first & kNumber) != 0) return scan_number_group(reader, begin, max_digits);
  const char* next = begin + n;
  size_t m = 0;
  const uint8_t second = next < end ? reader.flags(next, m) : static_cast<uint8_t>(kSpace);
  if ((first & kNewline) == 0 && (second & kLetter) != 0) return reader.skip(next + m, kLetter);
  if ((first & kSpace) == 0 || (*begin == ' ' && (second & kLetterNumberSpace) == 0))
    return reader.skip(reader.skip_except(next, kLetterNumberSpace), kNewline);
  return scan_space(reader, begin, true);
}

// [Lu Lt Lm Lo M]*[Ll Lm Lo M]+ at p: its end, or p. Taking all it can, the first half leaves the second the
// run of Ll behind it; where none is, it gives back down to its last character that is in both.
const char* match_lower_word(const CodePointReader& reader, const char* p) {
  const char* q = p;
  const char* after_both = p;
  size_t n = 0;
  while (q < reader.end) {
    const uint8_t f = reader.flags(q, n);
    if ((f & kUpperish) == 0) break;
    q += n;
    if ((f & kLowerish) != 0) after_both = q;
  }
  const char* lower_end = reader.skip(q, kLowerish);
  return lower_end > q ? lower_end : after_both;
}

// Rust's char::is_numeric, which Digits asks, follows Unicode 17.0: 13 numbers more than \p{N} has.
bool is_numeric(const CodePointReader& reader, const char* p, size_t& length) {
  if ((reader.flags(p, length) & kNumber) != 0) return true;
  if (length != 4) return false;
  const uint32_t c = decode_valid_utf8(p, length);
  return (c >= 0x11de0 && c <= 0x11de9) || (c >= 0x16ff4 && c <= 0x16ff6);
}

// Both word alternatives of o200k at begin, without the contraction: the end, or begin.
const char* match_o200k_word(const CodePointReader& reader, const char* begin, uint8_t first,
                             size_t first_length) {
  const bool prefix = (first & (kLetterNumber | kNewline)) == 0;
  const char* next = begin + first_length;
  if (prefix) {
    const char* e = match_lower_word(reader, next);
    if (e > next) return e;
  }
  const char* e = match_lower_word(reader, begin);
  if (e > begin) return e;
  if (prefix) {
    e = reader.skip(next, kUpperish);
    if (e > next) return reader.skip(e, kLowerish);
  }
  e = reader.skip(begin, kUpperish);
  return e > begin ? reader.skip(e, kLowerish) : begin;
}

}  // namespace

const char* scan_gpt2(const char* begin, const char* end) {
  const CodePointReader reader{end};
  if (const size_t n = contraction(begin, end, false)) return begin + n;
  size_t n = 0;
  uint8_t f = reader.flags(begin, n);
  const char* p = begin;
  if (*begin == ' ' && begin + 1 < end) {
    p = begin + 1;
    f = reader.flags(p, n);
  }
  if ((f & kLetter) != 0) return reader.skip(p + n, kLetter);
  if ((f & kNumber) != 0) return reader.skip(p + n, kNumber);
  if ((f & kSpace) == 0) return reader.skip_except(p + n, kLetterNumberSpace);
  return scan_space(reader, begin, false);
}

const char* scan_llama3(const char* begin, const char* end) { return scan_cl100k(begin, end, 3); }

const char* scan_qwen2(const char* begin, const char* end) { return scan_cl100k(begin, end, 1); }

const char* scan_o200k(const char* begin, const char* end) {
  const CodePointReader reader{end};
  size_t n = 0;
  const uint8_t first = reader.flags(begin, n);
  const char* word = match_o200k_word(reader, begin, first, n);
  if (word > begin) return word + contraction(word, end, true);
  if ((first & kNumber) != 0) return scan_number_group(reader, begin, 3);
  const char* p = *begin == ' ' ? begin + 1 : begin;
  const char* q = reader.skip_except(p, kLetterNumberSpace);
  if (q > p) {
    while (q < end && (*q == '\r' || *q == '\n' || *q == '/')) ++q;
    return q;
  }
  return scan_space(reader, begin, true);
}

const char* scan_digit(const char* begin, const char* end) {
  const CodePointReader reader{end};
  size_t n = 0;
  if (is_numeric(reader, begin, n)) return begin + n;
  const char* p = begin;
  while (p < end && !is_numeric(reader, p, n)) p += n;
  return p;
}

const char* scan_digit_run(const char* begin, const char* end) {
  const CodePointReader reader{end};
  size_t n = 0;
  const bool numeric = is_numeric(reader, begin, n);
  const char* p = begin;
  while (p < end && is_numeric(reader, p, n) == numeric) p += n;
  return p;
}

const char* scan_number(const char* begin, const char* end) {
  const CodePointReader reader{end};
  const char* e = reader.skip(begin, kNumber);
  return e > begin ? e : reader.skip_except(begin, kNumber);
}

const char* scan_punctuation(const char* begin, const char* end) {
  const CodePointReader reader{end};
  const auto matches = [&](const char* p, size_t& n) {
    return (reader.flags(p, n) & kPunctuation) != 0 ||
           std::string_view("$+<=>^~|").find(*p) != std::string_view::npos;
  };
  size_t n = 0;
  const bool inside = matches(begin, n);
  const char* p = begin;
  while (p < end && matches(p, n) == inside) p += n;
  return p;
}

const char* scan_three_digits(const char* begin, const char* end) {
  const auto matches = [end](const char* p) {
    if (end - p < 3) return false;
    for (int i = 0; i < 3; ++i)
      if (p[i] < '0' || p[i] > '9') return false;
    return true;
  };
  if (matches(begin)) return begin + 3;
  const char* p = begin;
  while (p < end && !matches(p)) ++p;
  return p;
}

Scanner find_split_scanner(std::string_view regex) {
  struct Known {
    std::string_view regex;
    Scanner scanner;
  };
  static constexpr Known kKnown[] = {
      {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", scan_gpt2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
       R"(\s+(?!\S)|\s+)",
       scan_llama3},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
       R"(\s+(?!\S)|\s+)",
       scan_qwen2},
      {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       scan_o200k},
      {R"(\p{N}+)", scan_number},
  };
  for (const Known& known : kKnown)
    if (known.regex == regex) return known.scanner;
  return nullptr;
}

std::optional<std::vector<Scanner>> find_gguf_scanners(std::string_view pre) {
  if (pre == "gpt-2") return {{scan_gpt2}};
  if (pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3") return {{scan_llama3}};
  if (pre == "qwen2" || pre == "deepseek-r1-qwen") return {{scan_qwen2}};
  if (pre == "gpt-4o") return {{scan_o200k}};
  if (pre == "smollm") return {{scan_digit, scan_gpt2}};
  // What converters wrote before they knew the model: llama.cpp's fallback, for the same ids as there.
  if (pre == "default" || pre.empty()) return {{scan_punctuation, scan_gpt2, scan_number, scan_three_digits}};
  return std::nullopt;
}

}  // namespace millrace
