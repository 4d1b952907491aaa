// SentencePiece BPE with byte fallback (Llama 2, TinyLlama, Mistral): characters are symbols, U+2581 is a
// space, and a character the vocabulary lacks becomes its bytes' tokens.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe_tokenizer.h"

namespace millrace {

// What a space is written as: U+2581.
inline constexpr std::string_view kSpaceMark = "\xe2\x96\x81";

// <0xXX> as its byte, -1 for other pieces.
int byte_of_piece(std::string_view piece);

struct SentencePieceOptions {
  // Where U+2581 is put before the text: before every stretch between added tokens, or only at the very
  // start; kFirst and kAlwaysUnlessThere leave a text alone that begins with one (Hugging Face's Metaspace).
  enum class Prefix { kNever, kAlways, kAlwaysUnlessThere, kFirst };
  Prefix prefix = Prefix::kAlways;
  bool metaspace = false;  // the prefix is put by the pre-tokenizer, so after normalized added tokens are cut
  bool split_at_spaces = false;  // every U+2581 begins a word
  bool byte_fallback = true;
  std::array<int64_t, 256> byte_ids{};  // of <0x00> to <0xFF>; -1 where there is none
  TokenTable extra_symbols;  // characters that are no token but begin one: symbols from tokens.size() on

  bool decode_bytes = true;        // byte tokens are shown as their bytes, not as they are written
  size_t strip_left = 1;           // spaces that decode drops at the start
  bool strip_first_token = false;  // Metaspace's decoder: all of the first token's
};

class SentencePiece final : public BpeTokenizer {
 public:
  SentencePiece(TokenizerParts parts, SentencePieceOptions options);
  std::string decode(std::span<const TokenId> ids, bool special) const override;
  bool strips_leading_space() const override { return options_.strip_left > 0 || options_.strip_first_token; }

 private:
  std::string_view normalize(std::string_view text, EncodeState& state) const override;
  void encode_text(std::string_view text, bool at_start, EncodeState& state) const override;
  void start_symbols(std::string_view word, std::vector<uint32_t>& symbols) const override;
  void emit(uint32_t symbol, std::vector<TokenId>& out) const override;
  bool drops_text() const override { return !bytes_complete(); }
  std::string piece_bytes(uint32_t id) const override;
  std::string shown(std::string content) const override;
  bool bytes_complete() const;  // every byte has a token of its own
  void fall_back(std::string_view character, std::vector<uint32_t>& symbols) const;

  SentencePieceOptions options_;
  bool words_end_at_spaces_ = false;  // no token has U+2581 behind another character: words may be cut there
};

}  // namespace millrace
