// Each step is a pass over code points, in Hugging Face's order.
#include "tokenizer/bert_normalizer.h"

#include <algorithm>
#include <iterator>

#include "tokenizer/bert_tables.h"
#include "tokenizer/nfc.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

const CodePointTable& bert_flags() {
  static const CodePointTable table(kBertFlagRanges, kNumBertFlagRanges);
  return table;
}

// What clean_text makes of the white space it knows: a space. The other kinds are control characters to it.
bool is_cleaned_to_space(uint32_t c) { return (bert_flags()[c] & kBertSpace) != 0; }

void append_lower(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out.push_back(static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c));
    return;
  }
  if (c == 0x130) {  // capital I with a dot becomes i and the dot
    out += "i\xcc\x87";
    return;
  }
  const LowerRun* end = kBertLowerRuns + kNumBertLowerRuns;
  const LowerRun* run =
      std::partition_point(kBertLowerRuns, end, [c](const LowerRun& r) { return r.last < c; });
  const bool found = run != end && c >= run->first && (c - run->first) % run->stride == 0;
  append_utf8(out, found ? static_cast<uint32_t>(static_cast<int32_t>(c) + run->delta) : c);
}

template <typename Each>
void for_each_code_point(std::string_view text, Each each) {
  for (size_t i = 0, n = 0; i < text.size(); i += n) each(decode_valid_utf8(text.data() + i, n));
}

}  // namespace

std::string BertNormalizer::operator()(std::string_view text) const {
  const CodePointTable& flags = bert_flags();
  std::string now;
  now.reserve(text.size() + text.size() / 8);
  for_each_code_point(valid_utf8(text), [&](uint32_t c) {
    if (clean_text && (flags[c] & kBertRemoved) != 0) return;
    if (clean_text && is_cleaned_to_space(c)) c = ' ';
    const bool apart = chinese_apart && (flags[c] & kBertChinese) != 0;
    if (apart) now.push_back(' ');
    append_utf8(now, c);
    if (apart) now.push_back(' ');
  });
  if (strip_accents) {
    const std::string decomposed = to_nfd(now);
    now.clear();
    for_each_code_point(decomposed, [&](uint32_t c) {
      if ((flags[c] & kBertAccent) == 0) append_utf8(now, c);
    });
  }
  if (!lowercase) return now;
  std::string lower;
  lower.reserve(now.size());
  for_each_code_point(now, [&](uint32_t c) { append_lower(lower, c); });
  return lower;
}

std::string_view next_bert_word(std::string_view text, size_t& begin) {
  const CodePointTable& flags = bert_flags();
  size_t first = std::string_view::npos;
  size_t n = 0;
  for (size_t i = begin; i < text.size(); i += n) {
    const uint8_t f = flags[decode_valid_utf8(text.data() + i, n)];
    const bool inside = first != std::string_view::npos;
    if ((f & (kBertSpace | kBertPunctuation)) != 0 && inside) {
      begin = i;
      return text.substr(first, i - first);
    }
    if ((f & kBertPunctuation) != 0) {
      begin = i + n;
      return text.substr(i, n);
    }
    if ((f & kBertSpace) == 0 && !inside) first = i;
  }
  begin = text.size();
  return first == std::string_view::npos ? std::string_view() : text.substr(first);
}

}  // namespace millrace
