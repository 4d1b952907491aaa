// RWKV's World tokenizer: at each place of the text the longest token that is there, of any bytes.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "tokenizer/bpe_tokenizer.h"

namespace millrace {

// A token as GGUF files have it, a Python literal of bytes without its quotes: \n, \xff, \\. False, with
// `bytes` unspecified, where it ends within an escape or has one that is none.
bool unescape_rwkv_token(std::string_view token, std::string& bytes);

class RwkvWorld final : public BpeTokenizer {
 public:
  explicit RwkvWorld(TokenizerParts parts);
  std::string decode(std::span<const TokenId> ids, bool special) const override;

 private:
  std::string_view normalize(std::string_view text, EncodeState&) const override { return text; }
  void encode_text(std::string_view text, bool at_start, EncodeState& state) const override;
  // Nothing is merged.
  void start_symbols(std::string_view, std::vector<uint32_t>&) const override {}
  bool drops_text() const override { return !parts_.unk.has_value(); }

  std::array<size_t, 256> longest_{};  // [first byte]: bytes of the longest token
};

}  // namespace millrace
