// Byte-level BPE: every byte is a symbol, so every input has ids. GPT-2, Llama 3, Qwen 2 and 3, SmolLM2,
// o200k.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/pretokenizer.h"

namespace millrace {

// Files write each byte of a token as one printable character (GPT-2's bytes_to_unicode: a space is U+0120).
// False, with `bytes` unspecified, when a character stands for no byte.
bool decode_byte_characters(std::string_view token, std::string& bytes);

struct ByteBpeOptions {
  std::vector<Scanner> scanners;  // applied one inside the other
  bool nfc = false;
  bool add_prefix_space = false;  // before a text that has none
};

// Bytes that are not UTF-8 are kept exactly: they extend the word before them, and the next word begins
// behind them. So does tiktoken's _encode_bytes with an ill-formed end, the one oracle there is for such
// input.
class ByteBpe final : public BpeTokenizer {
 public:
  ByteBpe(TokenizerParts parts, ByteBpeOptions options);
  std::string decode(std::span<const TokenId> ids, bool special) const override;
  std::string_view gguf_pre() const override {
    return name_gguf_pretokenizer(options_.scanners, options_.nfc);
  }

 private:
  std::string_view normalize(std::string_view text, EncodeState& state) const override;
  void encode_text(std::string_view text, bool at_start, EncodeState& state) const override;
  void start_symbols(std::string_view word, std::vector<uint32_t>& symbols) const override;
  size_t shrinks() const override;
  bool drops_byte(uint8_t byte) const override;
  std::string_view extend_over_space(std::string_view word, size_t out_begin, EncodeState& state) const;
  void split(const char* begin, const char* end, size_t stage, std::string_view& held,
             EncodeState& state) const;

  static constexpr uint32_t kAbsent = UINT32_MAX;
  ByteBpeOptions options_;
  uint32_t
      byte_symbols_[256];  // kAbsent: the vocabulary lacks it and has no unknown token; the byte is dropped
};

}  // namespace millrace
