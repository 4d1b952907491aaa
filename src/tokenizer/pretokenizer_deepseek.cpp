// The expressions of DeepSeek's tokenizers, which cut one inside the other: numbers, then scripts without
// spaces, then words (V3); line ends, words, punctuation, scripts, digits (LLM and Coder).
#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "tokenizer/code_point_reader.h"
#include "tokenizer/pretokenizer.h"

namespace millrace {
namespace {

struct Range {
  uint32_t first, last;
  bool operator==(const Range&) const = default;
};

// The letters with case that DeepSeek LLM's expression lists: \p{Lu}\p{Ll}\p{Lt} of its day.
constexpr Range kCased[] = {
    {0x41, 0x5a},       {0x61, 0x7a},       {0xb5, 0xb5},       {0xc0, 0xd6},       {0xd8, 0xf6},
    {0xf8, 0x1ba},      {0x1bc, 0x1bf},     {0x1c4, 0x293},     {0x295, 0x2af},     {0x370, 0x373},
    {0x376, 0x377},     {0x37b, 0x37d},     {0x37f, 0x37f},     {0x386, 0x386},     {0x388, 0x38a},
    {0x38c, 0x38c},     {0x38e, 0x3a1},     {0x3a3, 0x3f5},     {0x3f7, 0x481},     {0x48a, 0x52f},
    {0x531, 0x556},     {0x10a0, 0x10c5},   {0x13a0, 0x13f5},   {0x13f8, 0x13fd},   {0x1c90, 0x1cba},
    {0x1cbd, 0x1cbf},   {0x1d00, 0x1d2b},   {0x1d6b, 0x1d77},   {0x1d79, 0x1d9a},   {0x1e00, 0x1f15},
    {0x1f18, 0x1f1d},   {0x1f20, 0x1f45},   {0x1f48, 0x1f4d},   {0x1f50, 0x1f57},   {0x1f59, 0x1f59},
    {0x1f5b, 0x1f5b},   {0x1f5d, 0x1f5d},   {0x1f5f, 0x1f7d},   {0x1f80, 0x1fb4},   {0x1fb6, 0x1fbc},
    {0x1fbe, 0x1fbe},   {0x1fc2, 0x1fc4},   {0x1fc6, 0x1fcc},   {0x1fd0, 0x1fd3},   {0x1fd6, 0x1fdb},
    {0x1fe0, 0x1fec},   {0x1ff2, 0x1ff4},   {0x1ff6, 0x1ffc},   {0x2102, 0x2102},   {0x2107, 0x2107},
    {0x210a, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211d},   {0x2124, 0x2124},   {0x2126, 0x2126},
    {0x2128, 0x2128},   {0x212a, 0x212d},   {0x212f, 0x2134},   {0x2139, 0x2139},   {0x213c, 0x213f},
    {0x2145, 0x2149},   {0x214e, 0x214e},   {0x2183, 0x2184},   {0x2c00, 0x2c7b},   {0x2c7e, 0x2ce4},
    {0x2ceb, 0x2cee},   {0x2cf2, 0x2cf3},   {0xa640, 0xa66d},   {0xa680, 0xa69b},   {0xa722, 0xa76f},
    {0xa771, 0xa787},   {0xa78b, 0xa78e},   {0xab70, 0xabbf},   {0xfb00, 0xfb06},   {0xfb13, 0xfb17},
    {0xff21, 0xff3a},   {0xff41, 0xff5a},   {0x10400, 0x1044f}, {0x104b0, 0x104d3}, {0x104d8, 0x104fb},
    {0x10c80, 0x10cb2}, {0x10cc0, 0x10cf2}, {0x118a0, 0x118df}, {0x1e900, 0x1e943},
};
constexpr Range kHanKana[] = {{0x3040, 0x30ff}, {0x4e00, 0x9fa5}};
constexpr Range kHanHangul[] = {{0x800, 0x9fa5}, {0xac00, 0xd7ff}};  // as the expression has it: from U+0800
constexpr Range kMarks[] = {{'!', '/'},       {':', '~'},       {0x2018, 0x201f},
                            {0x3000, 0x3002}, {0xff01, 0xff0f}, {0xff1a, 0xff5e}};

template <size_t N>
bool is_in(const Range (&ranges)[N], const char* p, size_t& length) {
  length = 1;
  const uint8_t b = static_cast<uint8_t>(*p);
  const uint32_t c = b < 0x80 ? b : decode_valid_utf8(p, length);
  return std::any_of(std::begin(ranges), std::end(ranges),
                     [c](const Range& r) { return c >= r.first && c <= r.last; });
}

// Where a piece ends under an expression whose match at p ends at match(p), p itself for none.
template <typename Match>
const char* match_or_gap(const char* begin, const char* end, Match match) {
  const CodePointReader reader{end};
  const char* matched = match(begin);
  if (matched > begin) return matched;
  size_t n = 0;
  const char* p = begin;
  do {
    reader.flags(p, n);
    p += n;
  } while (p < end && match(p) == p);
  return p;
}

// [class]+ or \s?[class]+
template <typename InClass>
const char* match_run(const CodePointReader& reader, const char* p, bool space, InClass in_class) {
  size_t n = 0;
  const auto run = [&](const char* q) {
    while (q < reader.end && in_class(q, n)) q += n;
    return q;
  };
  if (space && (reader.flags(p, n) & kSpace) != 0) {
    const char* word = p + n;
    const char* e = run(word);
    if (e > word) return e;
  }
  return run(p);
}

template <typename InClass>
const char* scan_run(const char* begin, const char* end, bool space, InClass in_class) {
  const CodePointReader reader{end};
  return match_or_gap(begin, end, [&](const char* p) { return match_run(reader, p, space, in_class); });
}

bool is_mark(uint8_t flags) { return (flags & kUpperish) != 0 && (flags & kLetter) == 0; }

bool is_ascii_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

bool is_ascii_punctuation(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

struct DeepSeek3Words {
  const CodePointReader& reader;
  const CodePointTable& symbols = symbol_table();

  bool punctuation_or_symbol(const char* p, size_t& n) const {
    if ((reader.flags(p, n) & kPunctuation) != 0) return true;
    const uint8_t b = static_cast<uint8_t>(*p);
    return symbols[b < 0x80 ? b : decode_valid_utf8(p, n)] != 0;
  }
  bool letter_or_mark(const char* p, size_t& n) const {
    const uint8_t f = reader.flags(p, n);
    return (f & kLetter) != 0 || is_mark(f);
  }
  const char* skip_letters(const char* p) const {
    size_t n = 0;
    while (p < reader.end && letter_or_mark(p, n)) p += n;
    return p;
  }

  // [ascii punctuation][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|
  // \s+(?!\S)|\s+
  const char* operator()(const char* begin) const {
    const char* end = reader.end;
    if (is_ascii_punctuation(*begin) && begin + 1 < end && is_ascii_letter(begin[1])) {
      const char* p = begin + 1;
      while (p < end && is_ascii_letter(*p)) ++p;
      return p;
    }
    size_t n = 0, m = 0;
    const uint8_t first = reader.flags(begin, n);
    const bool marks = punctuation_or_symbol(begin, m);
    const bool letter = (first & kLetter) != 0;
    if ((first & kNewline) == 0 && !letter && !marks && begin + n < end && letter_or_mark(begin + n, m))
      return skip_letters(begin + n);
    if (letter || is_mark(first)) return skip_letters(begin);
    const char* p = *begin == ' ' ? begin + 1 : begin;
    if (p < end && punctuation_or_symbol(p, m)) {
      while (p < end && punctuation_or_symbol(p, m)) p += m;
      return reader.skip(p, kNewline);
    }
    return (first & kSpace) != 0 ? scan_space(reader, begin, true) : begin;
  }
};

// The ranges of a class as it is written between brackets, neighbours joined.
std::optional<std::vector<Range>> parse_class(std::string_view text) {
  std::vector<uint32_t> points;
  for (size_t i = 0; i < text.size();) {
    size_t n = utf8_sequence_length(text.substr(i));
    if (n == 0) return std::nullopt;
    points.push_back(decode_valid_utf8(text.data() + i, n));
    i += n;
  }
  std::vector<Range> ranges;
  for (size_t i = 0; i < points.size();) {
    const bool range = i + 2 < points.size() && points[i + 1] == '-';
    const Range r{points[i], range ? points[i + 2] : points[i]};
    if (!ranges.empty() && ranges.back().last + 1 == r.first)
      ranges.back().last = r.last;
    else
      ranges.push_back(r);
    i += range ? 3 : 1;
  }
  return ranges;
}

}  // namespace

bool is_cased_letters(std::string_view regex) {
  constexpr std::string_view kBefore = "\\s?[", kBehind = "]+";
  if (!regex.starts_with(kBefore) || !regex.ends_with(kBehind)) return false;
  regex.remove_prefix(kBefore.size());
  regex.remove_suffix(std::min(kBehind.size(), regex.size()));
  const std::optional<std::vector<Range>> ranges = parse_class(regex);
  return ranges && std::equal(ranges->begin(), ranges->end(), std::begin(kCased), std::end(kCased));
}

const char* scan_deepseek3(const char* begin, const char* end) {
  const CodePointReader reader{end};
  return match_or_gap(begin, end, DeepSeek3Words{reader});
}

const char* scan_number_by_three(const char* begin, const char* end) {
  const CodePointReader reader{end};
  const char* e = scan_number_group(reader, begin, 3);
  return e > begin ? e : reader.skip_except(begin, kNumber);
}

const char* scan_one_number(const char* begin, const char* end) {
  const CodePointReader reader{end};
  const char* e = scan_number_group(reader, begin, 1);
  return e > begin ? e : reader.skip_except(begin, kNumber);
}

const char* scan_han_or_kana(const char* begin, const char* end) {
  return scan_run(begin, end, false, [](const char* p, size_t& n) { return is_in(kHanKana, p, n); });
}

const char* scan_han_or_hangul(const char* begin, const char* end) {
  return scan_run(begin, end, false, [](const char* p, size_t& n) { return is_in(kHanHangul, p, n); });
}

const char* scan_line_end(const char* begin, const char* end) {
  const char* p = begin;
  while (p < end && *p != '\r' && *p != '\n') ++p;
  return p == begin ? begin + 1 : p;
}

const char* scan_space_letters(const char* begin, const char* end) {
  const CodePointReader reader{end};
  return scan_run(begin, end, true,
                  [&](const char* p, size_t& n) { return (reader.flags(p, n) & kLetter) != 0; });
}

const char* scan_space_punctuation(const char* begin, const char* end) {
  const CodePointReader reader{end};
  return scan_run(begin, end, true,
                  [&](const char* p, size_t& n) { return (reader.flags(p, n) & kPunctuation) != 0; });
}

const char* scan_space_cased(const char* begin, const char* end) {
  return scan_run(begin, end, true, [](const char* p, size_t& n) { return is_in(kCased, p, n); });
}

const char* scan_space_marks(const char* begin, const char* end) {
  return scan_run(begin, end, true, [](const char* p, size_t& n) { return is_in(kMarks, p, n); });
}

// $ also stands before a line end in the middle of the text, and \s+ gives back until it does.
const char* scan_space_at_end(const char* begin, const char* end) {
  const CodePointReader reader{end};
  const auto match = [&](const char* p) {
    const char* last = p;
    size_t n = 0;
    for (const char* q = p; q < end && (reader.flags(q, n) & kSpace) != 0;) {
      q += n;
      if (q == end || *q == '\n') last = q;
    }
    return last;
  };
  size_t n = 0;
  const char* e = match(begin);
  if (e > begin) return e;
  // A run of white space without a match is passed whole: nothing inside it matches either.
  const char* p = begin;
  do {
    const char* behind = reader.skip(p, kSpace);
    if (behind == p) {
      reader.flags(p, n);
      behind = p + n;
    }
    p = behind;
  } while (p < end && match(p) == p);
  return p;
}

}  // namespace millrace
