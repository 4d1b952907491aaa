// A made-up vocabulary of any size that a tokenizer accepts: byte-level BPE with all bytes, words of
// two-letter syllables with the merges that lead to them, and special tokens at given ids.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace millrace::cli {

struct SyntheticVocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;  // GGUF's: 1 normal, 3 control
  std::vector<std::string> merges;
};

// Throws Error when `size` has no room for the bytes and the specials, or asks for more than there are words.
SyntheticVocabulary make_vocabulary(int32_t size, const std::map<int32_t, std::string>& specials);

}  // namespace millrace::cli
