// BERT's normalization: control characters dropped, Chinese characters set apart, accents stripped, lower
// case; and its words, cut at white space and around punctuation. As Hugging Face's BertNormalizer and
// BertPreTokenizer do it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace millrace {

struct BertNormalizer {
  bool clean_text = true;
  bool chinese_apart = true;
  bool strip_accents = true;
  bool lowercase = true;

  // Bytes that are not UTF-8 count as U+FFFD, which clean_text drops.
  std::string operator()(std::string_view text) const;
};

// The next word of text, which must be well-formed, from `begin` on; empty at the end. Moves begin behind it.
std::string_view next_bert_word(std::string_view text, size_t& begin);

}  // namespace millrace
