// WordPiece (BERT and the sentence encoders made of it): each word is cut into the longest pieces of the
// vocabulary from its start on, pieces behind the first written with "##"; a word that cannot be is unknown.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bert_normalizer.h"
#include "tokenizer/bpe_tokenizer.h"

namespace millrace {

struct WordPieceOptions {
  BertNormalizer normalizer;
  std::string continuing = "##";  // what a piece inside a word begins with
  size_t max_word_chars = 100;    // longer words are unknown
  bool clean_up = true;           // decoding takes the space before punctuation and contractions away
};

class WordPiece final : public BpeTokenizer {
 public:
  WordPiece(TokenizerParts parts, WordPieceOptions options);
  std::string decode(std::span<const TokenId> ids, bool special) const override;
  bool strips_leading_space() const override { return true; }

 private:
  std::string_view normalize(std::string_view text, EncodeState& state) const override;
  void encode_text(std::string_view text, bool at_start, EncodeState& state) const override;
  // Words are not merged.
  void start_symbols(std::string_view, std::vector<uint32_t>&) const override {}
  bool drops_text() const override { return true; }
  std::string piece_bytes(uint32_t id) const override;
  void encode_pieces(std::string_view word, std::vector<TokenId>& out) const;

  WordPieceOptions options_;
  size_t longest_ = 0;  // bytes of the longest token
};

}  // namespace millrace
