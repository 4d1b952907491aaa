// SentencePiece merges over the whole text. Where no token has a space mark behind another character no merge
// can cross that place, so the text is cut there into words: the same ids, from a cache and short merges.
#include "tokenizer/sentencepiece.h"

#include <algorithm>

#include "tokenizer/unicode.h"

namespace millrace {
namespace {

// Spaces as marks, behind an optional first mark.
std::string with_marks(std::string_view text, bool prefix) {
  std::string out;
  out.reserve(text.size() + text.size() / 2 + 3);
  if (prefix) out += kSpaceMark;
  for (const char c : text) {
    if (c == ' ')
      out += kSpaceMark;
    else
      out.push_back(c);
  }
  return out;
}

std::string without_marks(std::string_view piece) {
  std::string out;
  for (size_t i = 0; i < piece.size();) {
    const bool mark = piece.substr(i).starts_with(kSpaceMark);
    out.push_back(mark ? ' ' : piece[i]);
    i += mark ? kSpaceMark.size() : 1;
  }
  return out;
}

bool mark_behind_other(std::string_view piece) {
  size_t i = 0;
  while (piece.substr(i).starts_with(kSpaceMark)) i += kSpaceMark.size();
  return piece.find(kSpaceMark, i) != std::string_view::npos;
}

}  // namespace

SentencePiece::SentencePiece(TokenizerParts parts, SentencePieceOptions options)
    : BpeTokenizer(std::move(parts)), options_(std::move(options)) {
  // Unknowns fuse across words and ignore_merges looks at the whole text: no cutting then.
  words_end_at_spaces_ = bytes_complete() && !parts_.ignore_merges;
  for (uint32_t id = 0; words_end_at_spaces_ && id < parts_.tokens.size(); ++id)
    if (parts_.tokens.has(id) && mark_behind_other(parts_.tokens.bytes(id))) words_end_at_spaces_ = false;
  index_added_tokens();
}

bool SentencePiece::bytes_complete() const {
  return options_.byte_fallback &&
         std::all_of(options_.byte_ids.begin(), options_.byte_ids.end(), [](int64_t id) { return id >= 0; });
}

std::string_view SentencePiece::normalize(std::string_view text, EncodeState& state) const {
  if (options_.metaspace) return text;
  const bool prefix = options_.prefix == SentencePieceOptions::Prefix::kAlways && !text.empty();
  return *state.kept.emplace_back(std::make_unique<std::string>(with_marks(text, prefix)));
}

void SentencePiece::encode_text(std::string_view text, bool at_start, EncodeState& state) const {
  using Prefix = SentencePieceOptions::Prefix;
  if (options_.metaspace) {
    const bool wanted =
        options_.prefix == Prefix::kAlwaysUnlessThere || (options_.prefix == Prefix::kFirst && at_start);
    const bool there = text.starts_with(" ") || text.starts_with(kSpaceMark);
    text = *state.kept.emplace_back(std::make_unique<std::string>(with_marks(text, wanted && !there)));
  }
  if (!words_end_at_spaces_ && !options_.split_at_spaces) {
    encode_word(text, state);
    return;
  }
  size_t begin = 0;
  while (begin < text.size()) {
    size_t i = begin;
    if (options_.split_at_spaces) {
      if (text.substr(i).starts_with(kSpaceMark)) i += kSpaceMark.size();
    } else {
      while (text.substr(i).starts_with(kSpaceMark)) i += kSpaceMark.size();
    }
    const size_t end = std::min(text.find(kSpaceMark, i), text.size());
    encode_word(text.substr(begin, end - begin), state);
    begin = end;
  }
}

void SentencePiece::start_symbols(std::string_view word, std::vector<uint32_t>& symbols) const {
  const uint32_t num_tokens = static_cast<uint32_t>(parts_.tokens.size());
  for (size_t i = 0; i < word.size();) {
    const size_t n = std::max<size_t>(1, utf8_sequence_length(word.substr(i)));
    const std::string_view character = word.substr(i, n);
    if (const auto id = parts_.tokens.find(character))
      symbols.push_back(*id);
    else if (const auto extra = options_.extra_symbols.find(character))
      symbols.push_back(num_tokens + *extra);
    else
      fall_back(character, symbols);
    i += n;
  }
}

void SentencePiece::fall_back(std::string_view character, std::vector<uint32_t>& symbols) const {
  const auto id = [&](char c) { return options_.byte_ids[static_cast<uint8_t>(c)]; };
  if (options_.byte_fallback &&
      std::all_of(character.begin(), character.end(), [&](char c) { return id(c) >= 0; })) {
    for (const char c : character) symbols.push_back(static_cast<uint32_t>(id(c)));
  } else if (parts_.unk) {
    append_unknown(symbols, *parts_.unk, parts_.fuse_unk);
  }
}

void SentencePiece::emit(uint32_t symbol, std::vector<TokenId>& out) const {
  if (symbol < parts_.tokens.size()) {
    out.push_back(static_cast<TokenId>(symbol));
    return;
  }
  std::vector<uint32_t> symbols;
  fall_back(options_.extra_symbols.bytes(symbol - static_cast<uint32_t>(parts_.tokens.size())), symbols);
  for (const uint32_t s : symbols) out.push_back(static_cast<TokenId>(s));
}

int byte_of_piece(std::string_view piece) {
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return -1;
  return digit(piece[3]) < 0 || digit(piece[4]) < 0 ? -1 : digit(piece[3]) * 16 + digit(piece[4]);
}

std::string SentencePiece::piece_bytes(uint32_t id) const {
  const std::string_view piece = parts_.tokens.bytes(id);
  const int byte = options_.decode_bytes ? byte_of_piece(piece) : -1;
  if (byte >= 0) return std::string(1, static_cast<char>(byte));
  return without_marks(piece);
}

std::string SentencePiece::shown(std::string content) const { return without_marks(content); }

std::string SentencePiece::decode(std::span<const TokenId> ids, bool special) const {
  std::string out;
  std::string bytes;  // of the byte tokens just read
  // Hugging Face's ByteFallback: a run of byte tokens is text as a whole, or each byte is U+FFFD.
  const auto flush = [&] {
    if (valid_utf8_prefix(bytes) == bytes.size())
      out += bytes;
    else
      for (size_t i = 0; i < bytes.size(); ++i) out += "\xef\xbf\xbd";
    bytes.clear();
  };
  bool first = true;
  for (const TokenId id : ids) {
    const std::string text = token_bytes(id, special);
    if (is_special(id) && !special) continue;
    const uint32_t index = static_cast<uint32_t>(id);
    const bool plain = added_token(index) == nullptr && parts_.tokens.has(index);
    if (plain && options_.decode_bytes && byte_of_piece(parts_.tokens.bytes(index)) >= 0) {
      bytes += text;
    } else {
      flush();
      out += first && options_.strip_first_token
                 ? text.substr(std::min(text.find_first_not_of(' '), text.size()))
                 : text;
    }
    first = false;
  }
  flush();
  size_t strip = 0;
  while (strip < options_.strip_left && strip < out.size() && out[strip] == ' ') ++strip;
  return valid_utf8(std::string_view(out).substr(strip));
}

}  // namespace millrace
