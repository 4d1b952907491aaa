// Tokenizer::from_gguf: the tokenizer.ggml.* arrays. A "gpt2" model brings its merges; a "llama" model brings
// scores, from which the merges are derived: any two symbols whose text joined is a piece merge, best score
// first; a "gemma4" model is one of those with its merges; a "bert" model has words with a mark before them
// and pieces inside words without; an "rwkv" model has tokens of bytes, written as Python does.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "tokenizer/byte_bpe.h"
#include "tokenizer/rwkv_world.h"
#include "tokenizer/sentencepiece.h"
#include "tokenizer/unicode.h"
#include "tokenizer/wordpiece.h"

namespace millrace {
namespace {

// tokenizer.ggml.token_type
constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;
// Longer pieces are no text; it bounds the work of finding a piece's halves.
constexpr size_t kMaxPieceBytes = 1024;

int32_t type_of(const GgufVocabulary& v, size_t id) { return v.types.empty() ? kNormal : v.types[id]; }

void check_special(const GgufVocabulary& v, const std::string& source) {
  const auto check = [&](const char* name, std::optional<TokenId> id) {
    if (id && (*id < 0 || static_cast<size_t>(*id) >= v.tokens.size()))
      throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.{}_token_id is {}, expected 0 to {}", source,
                  name, *id, v.tokens.size() - 1);
  };
  check("bos", v.bos);
  check("eos", v.eos);
  check("eot", v.eot);
  check("eom", v.eom);
  check("unknown", v.unk);
  check("padding", v.pad);
  check("cls", v.cls);
  check("seperator", v.sep);
}

void check_arrays(const GgufVocabulary& v, const std::string& source) {
  if (v.tokens.empty())
    throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.tokens is empty, expected tokens", source);
  if (v.tokens.size() > INT32_MAX / 2)
    throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.tokens has {} items, expected at most {}", source,
                v.tokens.size(), INT32_MAX / 2);
  if (!v.types.empty() && v.types.size() != v.tokens.size())
    throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.token_type has {} items, expected {} as in tokens",
                source, v.types.size(), v.tokens.size());
  for (size_t i = 0; i < v.types.size(); ++i)
    if (v.types[i] < kNormal || v.types[i] > kByte)
      throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.token_type[{}] is {}, expected {} to {}", source,
                  i, v.types[i], kNormal, kByte);
  check_special(v, source);
}

// Control, unknown and user-defined tokens are found in the text by their literal form.
void add_special_tokens(const GgufVocabulary& v, TokenizerParts& parts) {
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const int32_t type = type_of(v, id);
    if ((type != kControl && type != kUnknown && type != kUserDefined) || v.tokens[id].empty()) continue;
    if (v.tokens[id].size() > AddedTokenMatcher::kMaxContentBytes)
      throw_error(ErrorCode::kUnsupported,
                  "{}: tokenizer.ggml.tokens[{}], a special token, has {} bytes, supported: {}", parts.source,
                  id, v.tokens[id].size(), AddedTokenMatcher::kMaxContentBytes);
    AddedToken token;
    token.id = static_cast<uint32_t>(id);
    token.content = v.tokens[id];
    token.special = type != kUserDefined;
    parts.added.push_back(std::move(token));
  }
}

void add_ends(const GgufVocabulary& v, bool default_bos, TokenizerParts& parts) {
  parts.bos = v.bos;
  if (v.add_bos.value_or(default_bos) && v.bos) parts.prefix.push_back(*v.bos);
  if (v.add_eos.value_or(false) && v.eos) parts.suffix.push_back(*v.eos);
  for (const std::optional<TokenId> id : {v.eos, v.eot, v.eom})
    if (id && std::find(parts.ends.begin(), parts.ends.end(), *id) == parts.ends.end())
      parts.ends.push_back(*id);
  add_known_end_tokens(parts);
}

size_t total_bytes(const GgufVocabulary& v) {
  size_t n = 0;
  for (const std::string_view token : v.tokens) n += token.size();
  return n;
}

// Each half of "left right" is a token, of byte characters where byte_level is set, without a space.
void add_merges(const GgufVocabulary& v, bool byte_level, TokenizerParts& parts) {
  const auto decode = [byte_level](std::string_view token, std::string& bytes) {
    if (byte_level) return decode_byte_characters(token, bytes);
    bytes = token;
    return true;
  };
  parts.merges.reserve(v.merges.size());
  std::string left, right, joined;
  for (size_t i = 0; i < v.merges.size(); ++i) {
    const std::string_view merge = v.merges[i];
    const size_t space = merge.find(' ', 1);
    if (space == std::string_view::npos || !decode(merge.substr(0, space), left) ||
        !decode(merge.substr(space + 1), right))
      throw_error(ErrorCode::kBadInput,
                  "{}: tokenizer.ggml.merges[{}] is not two tokens with a space between", parts.source, i);
    joined.assign(left).append(right);
    const auto a = parts.tokens.find(left), b = parts.tokens.find(right), c = parts.tokens.find(joined);
    if (!a || !b || !c)
      throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.merges[{}]: {} is not in tokenizer.ggml.tokens",
                  parts.source, i,
                  !a   ? "its left half"
                  : !b ? "its right half"
                       : "what it makes");
    parts.merges.add(*a, *b, static_cast<uint32_t>(i), *c);
  }
}

std::shared_ptr<const Tokenizer> make_byte_level(const GgufVocabulary& v, const std::string& source) {
  std::optional<GgufPretokenizer> pre = find_gguf_pretokenizer(v.pre);
  if (!pre)
    throw_error(ErrorCode::kUnsupported, "{}: tokenizer.ggml.pre is \"{}\", supported: {}", source,
                printable(v.pre), gguf_pretokenizer_names());
  TokenizerParts parts;
  parts.source = source;
  parts.tokens.reserve(v.tokens.size(), total_bytes(v));
  std::string bytes;
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const int32_t type = type_of(v, id);
    const bool searchable = (type == kNormal || type == kByte) && decode_byte_characters(v.tokens[id], bytes);
    // Of two tokens with the same text the first is the one that is found.
    if (!searchable || !parts.tokens.add(static_cast<uint32_t>(id), bytes, true))
      parts.tokens.add(static_cast<uint32_t>(id), searchable ? std::string_view(bytes) : v.tokens[id], false);
  }
  add_merges(v, true, parts);
  add_special_tokens(v, parts);
  parts.ignore_merges = pre->ignore_merges;
  add_ends(v, pre->add_bos, parts);
  ByteBpeOptions options;
  options.nfc = pre->nfc;
  options.scanners = std::move(pre->scanners);
  options.add_prefix_space = v.add_space_prefix.value_or(false);
  return std::make_shared<ByteBpe>(std::move(parts), std::move(options));
}

// Pieces that merging can make: SentencePiece keeps control, unknown and byte pieces apart.
bool is_piece(int32_t type) { return type == kNormal || type == kUserDefined || type == kUnused; }

// The symbol of one half of a piece: a piece, or a single character that gets a symbol of its own.
std::optional<uint32_t> symbol_of(std::string_view text, const TokenTable& tokens, TokenTable& extra) {
  if (const auto id = tokens.find(text)) return *id;
  if (utf8_sequence_length(text) != text.size()) return std::nullopt;
  const uint32_t base = static_cast<uint32_t>(tokens.size());
  if (const auto id = extra.find(text)) return base + *id;
  const uint32_t id = static_cast<uint32_t>(extra.size());
  extra.add(id, text, true);
  return base + id;
}

// A piece as merging sees it: converters write the spaces of user-defined ones as spaces (Gemma's).
std::string piece_text(const GgufVocabulary& v, size_t id) {
  std::string out;
  for (const char c : v.tokens[id]) {
    if (c == ' ' && type_of(v, id) == kUserDefined)
      out += kSpaceMark;
    else
      out.push_back(c);
  }
  return out;
}

void derive_merges(const GgufVocabulary& v, TokenizerParts& parts, TokenTable& extra) {
  std::vector<float> scores;
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    if (std::isnan(v.scores[id]))
      throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.scores[{}] is not a number", parts.source, id);
    if (is_piece(type_of(v, id))) scores.push_back(v.scores[id]);
  }
  std::sort(scores.begin(), scores.end(), std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
  parts.merges.reserve(v.tokens.size() * 4);
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const std::string whole = piece_text(v, id);
    const std::string_view text = whole;
    // Where two tokens have the same text, only the one that is found is made.
    if (!is_piece(type_of(v, id)) || parts.tokens.find(text) != static_cast<uint32_t>(id)) continue;
    const auto place = std::lower_bound(scores.begin(), scores.end(), v.scores[id], std::greater<>());
    const uint32_t rank = static_cast<uint32_t>(place - scores.begin());
    for (size_t i = 0; i < text.size();) {
      const size_t n = utf8_sequence_length(text.substr(i));
      if (n == 0) break;  // not text: no input has its characters
      i += n;
      if (i >= text.size()) break;
      const auto left = symbol_of(text.substr(0, i), parts.tokens, extra);
      const auto right = symbol_of(text.substr(i), parts.tokens, extra);
      if (left && right) parts.merges.add(*left, *right, rank, static_cast<uint32_t>(id));
    }
  }
}

void add_pieces(const GgufVocabulary& v, TokenizerParts& parts, SentencePieceOptions& options) {
  options.byte_ids.fill(-1);
  parts.tokens.reserve(v.tokens.size(), total_bytes(v));
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const std::string text = piece_text(v, id);
    const int32_t type = type_of(v, id);
    if (text.size() > kMaxPieceBytes)
      throw_error(ErrorCode::kUnsupported, "{}: tokenizer.ggml.tokens[{}] has {} bytes, supported: {}",
                  parts.source, id, text.size(), kMaxPieceBytes);
    if (!is_piece(type) || !parts.tokens.add(static_cast<uint32_t>(id), text, true))
      parts.tokens.add(static_cast<uint32_t>(id), text, false);
    if (type == kUnknown && !parts.unk) parts.unk = static_cast<uint32_t>(id);
    const int byte = type == kByte || v.types.empty() ? byte_of_piece(text) : -1;
    if (byte >= 0) options.byte_ids[static_cast<size_t>(byte)] = static_cast<int64_t>(id);
  }
}

std::shared_ptr<const Tokenizer> make_sentencepiece(const GgufVocabulary& v, const std::string& source) {
  const bool merges = v.model == "gemma4";
  if (!merges && v.scores.size() != v.tokens.size())
    throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.scores has {} items, expected {} as in tokens",
                source, v.scores.size(), v.tokens.size());
  TokenizerParts parts;
  parts.source = source;
  parts.fuse_unk = true;
  SentencePieceOptions options;
  add_pieces(v, parts, options);
  if (v.unk) parts.unk = static_cast<uint32_t>(*v.unk);
  if (merges)
    add_merges(v, false, parts);
  else
    derive_merges(v, parts, options.extra_symbols);
  add_special_tokens(v, parts);
  add_ends(v, true, parts);
  const bool prefix = v.add_space_prefix.value_or(!merges);
  options.prefix = prefix ? SentencePieceOptions::Prefix::kAlways : SentencePieceOptions::Prefix::kNever;
  options.strip_left = prefix ? 1 : 0;
  return std::make_shared<SentencePiece>(std::move(parts), std::move(options));
}

// A vocabulary with capitals in its words is of a model that tells them apart.
bool has_capitals(const GgufVocabulary& v) {
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const auto is_capital = [](char c) { return c >= 'A' && c <= 'Z'; };
    if (type_of(v, id) == kNormal && v.tokens[id].starts_with(kSpaceMark) && !v.tokens[id].ends_with("]") &&
        std::any_of(v.tokens[id].begin(), v.tokens[id].end(), is_capital))
      return true;
  }
  return false;
}

std::shared_ptr<const Tokenizer> make_wordpiece(const GgufVocabulary& v, const std::string& source) {
  TokenizerParts parts;
  parts.source = source;
  WordPieceOptions options;
  options.normalizer.lowercase = v.lowercase.value_or(!has_capitals(v));
  options.normalizer.strip_accents = v.strip_accents.value_or(options.normalizer.lowercase);
  parts.tokens.reserve(v.tokens.size(), total_bytes(v) + 2 * v.tokens.size());
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    std::string text(v.tokens[id]);
    const int32_t type = type_of(v, id);
    const bool word = type == kNormal || type == kUnused || type == kUserDefined;
    if (word && text.starts_with(kSpaceMark))
      text.erase(0, kSpaceMark.size());
    else if (word && !(text.starts_with("[") && text.ends_with("]")))
      text.insert(0, options.continuing);
    if (!parts.tokens.add(static_cast<uint32_t>(id), text, true))
      parts.tokens.add(static_cast<uint32_t>(id), text, false);
  }
  add_special_tokens(v, parts);
  const auto token = [&](std::initializer_list<std::optional<TokenId>> ids, const char* name) {
    for (const std::optional<TokenId>& id : ids)
      if (id) return *id;
    if (const auto id = parts.tokens.find(name)) return static_cast<TokenId>(*id);
    throw_error(ErrorCode::kBadInput, "{}: tokenizer.ggml.tokens has no {}, expected it with model \"bert\"",
                source, name);
  };
  parts.unk = static_cast<uint32_t>(token({v.unk}, "[UNK]"));
  parts.bos = token({v.cls, v.bos}, "[CLS]");
  if (v.add_bos.value_or(true)) parts.prefix.push_back(*parts.bos);
  parts.suffix.push_back(token({v.sep, v.eos}, "[SEP]"));
  return std::make_shared<WordPiece>(std::move(parts), std::move(options));
}

std::shared_ptr<const Tokenizer> make_rwkv_world(const GgufVocabulary& v, const std::string& source) {
  TokenizerParts parts;
  parts.source = source;
  parts.tokens.reserve(v.tokens.size(), total_bytes(v));
  std::string bytes;
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const int32_t type = type_of(v, id);
    if (type != kNormal) {  // found in the text as added tokens, or not at all
      parts.tokens.add(static_cast<uint32_t>(id), v.tokens[id], false);
      continue;
    }
    if (!unescape_rwkv_token(v.tokens[id], bytes))
      throw_error(ErrorCode::kBadInput,
                  "{}: tokenizer.ggml.tokens[{}] is \"{}\", expected bytes as Python writes them", source, id,
                  printable(v.tokens[id]));
    if (!parts.tokens.add(static_cast<uint32_t>(id), bytes, true))
      parts.tokens.add(static_cast<uint32_t>(id), bytes, false);
  }
  add_special_tokens(v, parts);
  add_ends(v, false, parts);
  if (v.unk) parts.unk = static_cast<uint32_t>(*v.unk);
  return std::make_shared<RwkvWorld>(std::move(parts));
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::from_gguf(const GgufVocabulary& vocabulary,
                                                      const std::string& source) {
  const std::string& model = vocabulary.model;
  if (model != "gpt2" && model != "llama" && model != "gemma4" && model != "bert" && model != "rwkv")
    throw_error(ErrorCode::kUnsupported,
                "{}: tokenizer.ggml.model is \"{}\", supported: gpt2, llama, gemma4, bert, rwkv", source,
                printable(model));
  check_arrays(vocabulary, source);
  if (model == "bert") return make_wordpiece(vocabulary, source);
  if (model == "rwkv") return make_rwkv_world(vocabulary, source);
  return model == "gpt2" ? make_byte_level(vocabulary, source) : make_sentencepiece(vocabulary, source);
}

}  // namespace millrace
