#include "synth/vocabulary.h"

#include "base/error.h"

namespace millrace::cli {
namespace {

std::string utf8(uint32_t code_point) {
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xc0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3f))};
}

// GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the rest follow from U+0100 on.
std::vector<std::string> byte_alphabet() {
  std::vector<std::string> alphabet;
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    alphabet.push_back(utf8(printable ? byte : next++));
  }
  return alphabet;
}

struct Word {
  std::string left, right;  // the merge it comes from
};

// The first `count` words: syllables, the same after a space, two syllables, the same after a space, three.
std::vector<Word> make_words(size_t count, const std::string& space) {
  std::vector<std::string> syllables;
  std::vector<Word> words;
  const auto full = [&] { return words.size() >= count; };
  for (const char consonant : std::string("bcdfghjklmnpqrstvwxz")) {
    for (const char vowel : std::string("aeiou")) {
      syllables.push_back({consonant, vowel});
      words.push_back({{consonant}, {vowel}});
    }
  }
  for (const std::string& syllable : syllables) words.push_back({space, syllable});
  for (const std::string& prefix : {std::string(), space}) {
    for (const std::string& a : syllables) {
      for (const std::string& b : syllables) words.push_back({prefix + a, b});
      if (full()) break;
    }
  }
  for (const std::string& a : syllables) {
    for (const std::string& b : syllables) {
      if (full()) break;
      for (const std::string& c : syllables) words.push_back({a + b, c});
    }
  }
  words.resize(std::min(words.size(), count));
  return words;
}

}  // namespace

SyntheticVocabulary make_vocabulary(int32_t size, const std::map<int32_t, std::string>& specials) {
  constexpr int32_t kBytes = 256, kMaxWords = 1000000;
  const int32_t needed = kBytes + static_cast<int32_t>(specials.size());
  if (size < needed || size > kMaxWords) {
    throw_error(ErrorCode::kBadInput, "vocab_size: found {}, expected {} to {} for a synthetic vocabulary",
                size, needed, kMaxWords);
  }
  const std::vector<std::string> alphabet = byte_alphabet();
  const std::vector<Word> words = make_words(static_cast<size_t>(size - needed), alphabet[' ']);
  SyntheticVocabulary vocabulary;
  size_t next = 0;  // of the bytes, then of the words
  for (int32_t id = 0; id < size; ++id) {
    if (const auto special = specials.find(id); special != specials.end()) {
      vocabulary.tokens.push_back(special->second);
      vocabulary.types.push_back(3);
      continue;
    }
    if (next < alphabet.size()) {
      vocabulary.tokens.push_back(alphabet[next]);
    } else {
      const Word& word = words[next - alphabet.size()];
      vocabulary.tokens.push_back(word.left + word.right);
      vocabulary.merges.push_back(word.left + " " + word.right);
    }
    vocabulary.types.push_back(1);
    ++next;
  }
  return vocabulary;
}

}  // namespace millrace::cli
