// Text of tokens as they come.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tokenizer/tokenizer.h"

namespace millrace {

// Turns ids into text as they come, holding back the bytes of a character that is not complete yet. With
// `continues`, the text goes on from text already shown, and a SentencePiece model's first space stays.
class StreamingDetokenizer {
 public:
  explicit StreamingDetokenizer(std::shared_ptr<const Tokenizer> tokenizer, bool special = false,
                                bool continues = false);
  std::string push(TokenId id);  // valid UTF-8, possibly empty
  std::string finish();          // what was held back, invalid bytes replaced by U+FFFD

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool special_;
  bool strip_space_;  // the next byte, if it is a space, is the encoder's
  std::string pending_;
};

}  // namespace millrace
