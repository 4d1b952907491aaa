// The expressions are ordered alternations with backtracking. Each function tries the alternatives in that
// order from one position; all of them are linear because a run once measured is consumed whole.
#include "tokenizer/pretokenizer.h"

#include "tokenizer/code_point_reader.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

constexpr uint8_t kLetterNumber = kLetter | kNumber;
constexpr uint8_t kLetterNumberSpace = kLetter | kNumber | kSpace;

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

// (?i:'s|...)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// Without newlines_behind the [\r\n]* is not there. marks: [\p{L}\p{M}] for \p{L} in words and, at the front
// of a word, beside it: [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+, [^\s\p{L}\p{M}\p{N}]+.
const char* scan_cl100k(const char* begin, const char* end, int max_digits, bool newlines_behind = true,
                        bool marks = false) {
  const CodePointReader reader{end};
  const uint8_t in_word = marks ? kUpperish | kLowerish : kLetter;
  const uint8_t none = in_word | kNumber | kSpace;
  if (const size_t n = contraction(begin, end, true)) return begin + n;
  size_t n = 0;
  const uint8_t first = reader.flags(begin, n);
  if ((first & kLetter) != 0) return reader.skip(begin + n, in_word);
  if ((first & kNumber) != 0) return scan_number_group(reader, begin, max_digits);
  const char* next = begin + n;
  size_t m = 0;
  const uint8_t second = next < end ? reader.flags(next, m) : static_cast<uint8_t>(kSpace);
  if ((first & kNewline) == 0 && (second & in_word) != 0) return reader.skip(next + m, in_word);
  if ((first & in_word) != 0) return next;  // a mark alone
  if ((first & kSpace) == 0 || (*begin == ' ' && (second & none) == 0)) {
    const char* e = reader.skip_except(next, none);
    return newlines_behind ? reader.skip(e, kNewline) : e;
  }
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

// o200k's expression: words cut where capitals begin, numbers of up to max_digits; without slash, [\r\n]* for
// [\r\n/]*.
const char* scan_words_by_case(const CodePointReader& reader, const char* begin, bool contractions,
                               int max_digits, bool slash = true) {
  const char* end = reader.end;
  size_t n = 0;
  const uint8_t first = reader.flags(begin, n);
  const char* word = match_o200k_word(reader, begin, first, n);
  if (word > begin) return contractions ? word + contraction(word, end, true) : word;
  if ((first & kNumber) != 0) return scan_number_group(reader, begin, max_digits);
  const char* p = *begin == ' ' ? begin + 1 : begin;
  const char* q = reader.skip_except(p, kLetterNumberSpace);
  if (q > p) {
    while (q < end && (*q == '\r' || *q == '\n' || (slash && *q == '/'))) ++q;
    return q;
  }
  return scan_space(reader, begin, true);
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

const char* scan_seed(const char* begin, const char* end) { return scan_cl100k(begin, end, 1, false); }

const char* scan_qwen35(const char* begin, const char* end) { return scan_cl100k(begin, end, 1, true, true); }

const char* scan_o200k(const char* begin, const char* end) {
  return scan_words_by_case(CodePointReader{end}, begin, true, 3);
}

const char* scan_tekken(const char* begin, const char* end) {
  return scan_words_by_case(CodePointReader{end}, begin, false, 1);
}

const char* scan_kimi(const char* begin, const char* end) {
  const char* p = begin;
  for (size_t n = 0; p < end && static_cast<uint8_t>(*p) >= 0x80 && is_han(decode_valid_utf8(p, n)); p += n) {
  }
  if (p > begin) return p;
  CodePointReader reader{end};
  reader.han_apart = true;
  return scan_words_by_case(reader, begin, true, 3, /*slash=*/false);
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

}  // namespace millrace
