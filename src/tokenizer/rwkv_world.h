// RWKV's World tokenizer: at each place of the text the longest token that is there, of any bytes.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe_tokenizer.h"

namespace millrace {

// A token as GGUF files have it, a Python literal of bytes without its quotes: \n, \xff, \\. False, with
// `bytes` unspecified, where it ends within an escape or has one that is none.
bool unescape_rwkv_token(std::string_view token, std::string& bytes);

// A vocabulary's own file: a line for each token, its id, a Python literal of text or of bytes ('a', b'\xff')
// and its length in bytes; id 0, which has none, ends a text. Throws Error{kBadInput} naming the line.
struct RwkvVocabulary {
  std::vector<std::string> tokens;  // as GGUF files have them
  std::vector<int32_t> types;       // GGUF's: 1 normal, 3 control, 5 unused
};
RwkvVocabulary read_rwkv_vocabulary(std::string_view text, const std::string& source);

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
