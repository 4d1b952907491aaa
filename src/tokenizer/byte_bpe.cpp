// Words of well-formed text come from the scanners; one word is held back until it is known whether
// ill-formed bytes follow it.
#include "tokenizer/byte_bpe.h"

#include "tokenizer/nfc.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

// Code point -> byte for the 188 bytes that stand for themselves and the 68 moved to U+0100 and up; -1
// otherwise.
int byte_of_character(uint32_t c) {
  static const std::vector<int16_t> table = [] {
    std::vector<int16_t> t(256 + 68, -1);
    int moved = 256;
    for (int b = 0; b < 256; ++b) {
      const bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      t[static_cast<size_t>(itself ? b : moved++)] = static_cast<int16_t>(b);
    }
    return t;
  }();
  return c < table.size() ? table[c] : -1;
}

}  // namespace

bool decode_byte_characters(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (size_t i = 0; i < token.size();) {
    size_t n = utf8_sequence_length(token.substr(i));
    if (n == 0) return false;
    const int b = byte_of_character(decode_valid_utf8(token.data() + i, n));
    if (b < 0) return false;
    bytes.push_back(static_cast<char>(b));
    i += n;
  }
  return true;
}

ByteBpe::ByteBpe(TokenizerParts parts, ByteBpeOptions options)
    : BpeTokenizer(std::move(parts)), options_(std::move(options)) {
  for (int b = 0; b < 256; ++b) {
    const char c = static_cast<char>(b);
    byte_symbols_[b] = parts_.tokens.find(std::string_view(&c, 1)).value_or(parts_.unk.value_or(kAbsent));
  }
  index_added_tokens();
}

std::string_view ByteBpe::normalize(std::string_view text, EncodeState& state) const {
  if (!options_.nfc || is_nfc(text)) return text;
  return *state.kept.emplace_back(std::make_unique<std::string>(to_nfc(text)));
}

void ByteBpe::encode_text(std::string_view text, bool, EncodeState& state) const {
  if (options_.add_prefix_space && text[0] != ' ') {
    std::string& prefixed = *state.kept.emplace_back(std::make_unique<std::string>(1, ' '));
    text = prefixed.append(text);
  }
  const size_t out_begin = state.out.size();
  std::string_view held;  // the last word so far
  for (size_t i = 0; i < text.size();) {
    const size_t valid = valid_utf8_prefix(text.substr(i));
    if (valid > 0) split(text.data() + i, text.data() + i + valid, 0, held, state);
    i += valid;
    size_t bad = i;
    while (bad < text.size() && utf8_sequence_length(text.substr(bad)) == 0) ++bad;
    if (bad > i && !held.empty()) held = extend_over_space(held, out_begin, state);
    if (bad > i)
      held = held.empty() ? text.substr(i, bad - i) : std::string_view(held.data(), held.size() + bad - i);
    i = bad;
  }
  if (!held.empty()) encode_word(held, state);
}

// tiktoken's rule for the word that ill-formed bytes extend: when its first token is white space, the white
// space tokens before it join it. Takes those out of `out`; `out_begin` is where this text's ids begin.
std::string_view ByteBpe::extend_over_space(std::string_view word, size_t out_begin,
                                            EncodeState& state) const {
  const auto all_space = [this](TokenId id) {
    return parts_.tokens.bytes(static_cast<uint32_t>(id)).find_first_not_of(" \n\t") ==
           std::string_view::npos;
  };
  const size_t mark = state.out.size();
  encode_word(word, state);
  const bool space = state.out.size() > mark && all_space(state.out[mark]);
  state.out.resize(mark);
  ++state.generation;
  while (space && state.out.size() > out_begin && all_space(state.out.back())) {
    const size_t n = parts_.tokens.bytes(static_cast<uint32_t>(state.out.back())).size();
    word = std::string_view(word.data() - n, word.size() + n);
    state.out.pop_back();
  }
  return word;
}

void ByteBpe::split(const char* begin, const char* end, size_t stage, std::string_view& held,
                    EncodeState& state) const {
  if (stage == options_.scanners.size()) {
    if (!held.empty()) encode_word(held, state);
    held = std::string_view(begin, static_cast<size_t>(end - begin));
    return;
  }
  const Scanner scan = options_.scanners[stage];
  while (begin < end) {
    const char* piece_end = scan(begin, end);
    split(begin, piece_end, stage + 1, held, state);
    begin = piece_end;
  }
}

// NFC: U+1FBE with two marks, seven bytes, becomes U+0390 of two bytes, and nothing shrinks more.
size_t ByteBpe::shrinks() const { return options_.nfc ? 4 : 1; }

// Vocabularies may lack some bytes that no text has, as SmolLM2's does: what they become bounds nothing, and
// the others count as ever.
bool ByteBpe::drops_byte(uint8_t byte) const {
  const uint32_t symbol = byte_symbols_[byte];
  return symbol == kAbsent || symbol == parts_.unk;
}

void ByteBpe::start_symbols(std::string_view word, std::vector<uint32_t>& symbols) const {
  for (const char c : word) {
    const uint32_t symbol = byte_symbols_[static_cast<uint8_t>(c)];
    if (symbol == kAbsent) continue;
    if (symbol == parts_.unk)
      append_unknown(symbols, symbol, parts_.fuse_unk);
    else
      symbols.push_back(symbol);
  }
}

std::string ByteBpe::decode(std::span<const TokenId> ids, bool special) const {
  std::string bytes;
  for (const TokenId id : ids) bytes += token_bytes(id, special);
  return valid_utf8(bytes);
}

}  // namespace millrace
