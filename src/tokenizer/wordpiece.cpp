// The greedy search, and decoding with Hugging Face's rules for the spaces between words.
#include "tokenizer/wordpiece.h"

#include <algorithm>
#include <utility>

#include "base/work_budget.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

// Hugging Face's clean-up of one decoded token, in its order.
std::string cleaned_up(std::string text) {
  static constexpr std::pair<std::string_view, std::string_view> kRules[] = {
      {" .", "."},   {" ?", "?"},           {" !", "!"},   {" ,", ","},     {" ' ", "'"},   {" n't", "n't"},
      {" 'm", "'m"}, {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kRules)
    for (size_t i = text.find(from); i != std::string::npos; i = text.find(from, i + to.size()))
      text.replace(i, from.size(), to);
  return text;
}

size_t num_chars(std::string_view word) {
  return static_cast<size_t>(
      std::count_if(word.begin(), word.end(), [](char c) { return (c & '\xc0') != '\x80'; }));
}

}  // namespace

WordPiece::WordPiece(TokenizerParts parts, WordPieceOptions options)
    : BpeTokenizer(std::move(parts)), options_(std::move(options)) {
  for (uint32_t id = 0; id < parts_.tokens.size(); ++id)
    if (parts_.tokens.has(id)) longest_ = std::max(longest_, parts_.tokens.bytes(id).size());
  index_added_tokens();
}

std::string_view WordPiece::normalize(std::string_view text, EncodeState& state) const {
  return *state.kept.emplace_back(std::make_unique<std::string>(options_.normalizer(text)));
}

void WordPiece::encode_text(std::string_view text, bool, EncodeState& state) const {
  size_t begin = 0;
  while (state.out.size() <= state.max_tokens) {
    const std::string_view word = next_bert_word(text, begin);
    if (word.empty()) return;
    spend_work(4 + word.size());
    encode_pieces(word, state.out);
  }
}

void WordPiece::encode_pieces(std::string_view word, std::vector<TokenId>& out) const {
  const size_t before = out.size();
  bool known = num_chars(word) <= options_.max_word_chars;
  std::string piece;  // of what is left of the word
  for (size_t begin = 0; known && begin < word.size();) {
    const size_t mark = begin == 0 ? 0 : options_.continuing.size();
    piece.assign(options_.continuing, 0, mark).append(word.substr(begin));
    size_t length = std::min(piece.size(), longest_);
    std::optional<uint32_t> id;
    for (; length > mark; --length) {
      // Only whole characters.
      if (length < piece.size() && (piece[length] & '\xc0') == '\x80') continue;
      if ((id = parts_.tokens.find(std::string_view(piece).substr(0, length)))) break;
    }
    known = id.has_value();
    if (known) out.push_back(static_cast<TokenId>(*id));
    begin += length - mark;
  }
  if (known) return;
  out.resize(before);
  if (parts_.unk) out.push_back(static_cast<TokenId>(*parts_.unk));
}

// A word of running text has a space before it, a piece inside a word has none.
std::string WordPiece::piece_bytes(uint32_t id) const {
  const std::string_view piece = parts_.tokens.bytes(id);
  if (piece.starts_with(options_.continuing)) return std::string(piece.substr(options_.continuing.size()));
  return " " + std::string(piece);
}

std::string WordPiece::decode(std::span<const TokenId> ids, bool special) const {
  std::string out;
  bool first = true;
  for (const TokenId id : ids) {
    check_id(id);
    if (is_special(id) && !special) continue;
    const uint32_t index = static_cast<uint32_t>(id);
    const AddedToken* added = added_token(index);
    if (added == nullptr && !parts_.tokens.has(index)) continue;
    std::string text = added != nullptr ? added->content : std::string(parts_.tokens.bytes(index));
    if (!first) {
      if (text.starts_with(options_.continuing))
        text.erase(0, options_.continuing.size());
      else
        text.insert(0, 1, ' ');
    }
    out += options_.clean_up ? cleaned_up(std::move(text)) : text;
    first = false;
  }
  return valid_utf8(out);
}

}  // namespace millrace
