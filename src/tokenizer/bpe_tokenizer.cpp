// The common half of the tokenizers; see the header.
#include "tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/error.h"
#include "base/work_budget.h"

namespace millrace {
namespace {

constexpr uint8_t kDirect = 1;
constexpr uint8_t kIndirect = 2;
constexpr size_t kMaxCachedBytes = 128;            // longer words hardly come twice
constexpr size_t kMaxTextBytes = size_t{1} << 31;  // merging counts positions in 32 bits

}  // namespace

BpeTokenizer::BpeTokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
  size_t size = parts_.tokens.size();
  for (size_t i = 0; i < parts_.added.size(); ++i) {
    const AddedToken& token = parts_.added[i];
    size = std::max<size_t>(size, token.id + size_t{1});
    added_by_id_[token.id] = i;
    added_by_content_[token.content] = token.id;
  }
  vocab_size_ = static_cast<int32_t>(size);
  reach_ = std::make_unique<std::atomic<uint8_t>[]>(parts_.tokens.size());
}

void BpeTokenizer::index_added_tokens() {
  std::vector<AddedToken> raw, normalized;
  std::vector<std::string> raw_contents, normalized_contents;
  for (AddedToken& token : parts_.added) {
    // A normalized token is looked for, and shown, in its normalized form (Hugging Face's rule).
    if (token.normalized) {
      EncodeState state;
      normalized.push_back(token);
      token.content = normalized_contents.emplace_back(normalize(token.content, state));
    } else {
      raw.push_back(token);
      raw_contents.push_back(token.content);
    }
    token.content = shown(std::move(token.content));
  }
  raw_matcher_ = AddedTokenMatcher(raw, raw_contents);
  normalized_matcher_ = AddedTokenMatcher(normalized, normalized_contents);
  find_longest();
}

void BpeTokenizer::find_longest() {
  // White space beside a token that strips it, and unknowns that become one or none, are not bounded.
  const bool strips = std::any_of(parts_.added.begin(), parts_.added.end(),
                                  [](const AddedToken& t) { return t.lstrip || t.rstrip; });
  if (strips || drops_text()) return;
  std::array<size_t, 256> longest{};
  const auto look_at = [&](std::string_view bytes, size_t length) {
    for (const char c : bytes) {
      size_t& known = longest[static_cast<uint8_t>(c)];
      known = std::max(known, length);
    }
  };
  for (uint32_t id = 0; id < parts_.tokens.size(); ++id) {
    if (!parts_.tokens.has(id)) continue;
    // A space may be written as a space or as its mark, which is longer.
    const std::string_view written = parts_.tokens.bytes(id);
    const std::string shown = piece_bytes(id);
    look_at(written, std::max(written.size(), shown.size()));
    look_at(shown, std::max(written.size(), shown.size()));
  }
  for (const AddedToken& token : parts_.added) look_at(token.content, 3 * token.content.size());
  for (size_t b = 0; b < 256; ++b) {
    if (longest[b] > 0 && !drops_byte(static_cast<uint8_t>(b)))
      share_of_byte_[b] = 1.0f / static_cast<float>(longest[b] * shrinks());
  }
}

// A token of n bytes covers n places of the text, and each counts for at most 1/n: the sum of the shares is
// at most the number of tokens.
size_t BpeTokenizer::min_tokens(std::string_view text) const {
  std::array<size_t, 256> count{};
  for (const char c : text) ++count[static_cast<uint8_t>(c)];
  double sum = 0;
  for (size_t b = 0; b < 256; ++b)
    sum += static_cast<double>(count[b]) * static_cast<double>(share_of_byte_[b]);
  return static_cast<size_t>(sum * (1 - 1e-6));  // floats round
}

// Of a text that is far more than max_tokens by that bound, as much as is surely twice as many: the first
// max_tokens come out as they do of all of it, unless one word is as long.
std::string_view BpeTokenizer::enough_of(std::string_view text, size_t max_tokens) const {
  if (text.size() / 2 <= max_tokens) return text;
  const double wanted = 2.0 * static_cast<double>(max_tokens) + 16;
  double sum = 0;
  size_t end = 0;
  while (end < text.size() && sum <= wanted)
    sum += static_cast<double>(share_of_byte_[static_cast<uint8_t>(text[end++])]);
  while (end < text.size() && (text[end] & 0xc0) == 0x80) ++end;  // to the end of a character
  return text.substr(0, end);
}

std::vector<TokenId> BpeTokenizer::encode(std::string_view text, EncodeOptions options) const {
  if (text.size() >= kMaxTextBytes)
    throw_error(ErrorCode::kBadInput, "text to encode has {} bytes, expected fewer than {}", text.size(),
                kMaxTextBytes);
  text = enough_of(text, options.max_tokens);
  EncodeState state;
  state.max_tokens = options.max_tokens;
  // A slot per 16 bytes finds nearly all repetitions; small texts should not pay for clearing a large table.
  state.cache.resize(std::bit_ceil(std::clamp<size_t>(text.size() / 16, 16, 16384)));
  state.out.reserve(std::min(text.size() / 4, options.max_tokens) + 8);
  if (options.add_special) state.out = parts_.prefix;
  try {
    encode_all(text, options, state);
  } catch (const Enough&) {
    return std::move(state.out);
  }
  if (options.add_special) state.out.insert(state.out.end(), parts_.suffix.begin(), parts_.suffix.end());
  return std::move(state.out);
}

void BpeTokenizer::encode_all(std::string_view text, EncodeOptions options, EncodeState& state) const {
  std::vector<AddedTokenMatcher::Piece> pieces, inner;
  spend_work(text.size() / 4);
  raw_matcher_.split(text, options.parse_special, pieces);
  for (const AddedTokenMatcher::Piece& piece : pieces) {
    if (state.out.size() > state.max_tokens) throw Enough();
    if (piece.id >= 0) {
      state.out.push_back(static_cast<TokenId>(piece.id));
      continue;
    }
    const bool at_start = piece.text.data() == text.data();
    const std::string_view normalized = normalize(piece.text, state);
    if (normalized_matcher_.empty()) {
      encode_text(normalized, at_start, state);
      continue;
    }
    inner.clear();
    normalized_matcher_.split(normalized, options.parse_special, inner);
    for (const AddedTokenMatcher::Piece& part : inner) {
      if (part.id >= 0)
        state.out.push_back(static_cast<TokenId>(part.id));
      else
        encode_text(part.text, at_start && part.text.data() == normalized.data(), state);
    }
  }
}

void BpeTokenizer::encode_word(std::string_view word, EncodeState& state) const {
  spend_work(4 + word.size() / 16);
  if (state.out.size() > state.max_tokens) throw Enough();
  if (word.size() > kMaxCachedBytes) {
    if (parts_.ignore_merges) {
      if (const std::optional<uint32_t> id = parts_.tokens.find(word)) {
        state.out.push_back(static_cast<TokenId>(*id));
        return;
      }
    }
    merge_word(word, state);
    return;
  }
  const uint64_t hash = hash_bytes(word);
  const std::optional<uint32_t> id = parts_.tokens.find(word, hash);
  const uint8_t reach = id ? reach_[*id].load(std::memory_order_relaxed) : kIndirect;
  if (id && (parts_.ignore_merges || reach == kDirect)) {
    state.out.push_back(static_cast<TokenId>(*id));
    return;
  }
  EncodeState::CachedWord& slot = state.cache[(hash >> 20) & (state.cache.size() - 1)];
  if (slot.hash == hash && slot.generation == state.generation &&
      std::string_view(slot.text, slot.length) == word) {
    for (uint32_t i = 0; i < slot.num_ids; ++i) state.out.push_back(state.out[slot.out_begin + i]);
    return;
  }
  const size_t out_begin = state.out.size();
  merge_word(word, state);
  const uint32_t num_ids = static_cast<uint32_t>(state.out.size() - out_begin);
  slot = {word.data(), hash, static_cast<uint32_t>(word.size()), num_ids, out_begin, state.generation};
  if (id && reach == 0) {
    const bool direct = num_ids == 1 && state.out.back() == static_cast<TokenId>(*id);
    reach_[*id].store(direct ? kDirect : kIndirect, std::memory_order_relaxed);
  }
}

void BpeTokenizer::merge_word(std::string_view word, EncodeState& state) const {
  state.scratch.symbols.clear();
  start_symbols(word, state.scratch.symbols);
  merge_symbols(parts_.merges, state.scratch);
  for (const uint32_t symbol : state.scratch.symbols) emit(symbol, state.out);
}

void BpeTokenizer::check_id(TokenId id) const {
  if (id < 0 || id >= vocab_size_)
    throw_error(ErrorCode::kBadInput, "{}: token id is {}, expected 0 to {}", parts_.source, id,
                vocab_size_ - 1);
}

const AddedToken* BpeTokenizer::added_token(uint32_t id) const {
  const auto found = added_by_id_.find(id);
  return found == added_by_id_.end() ? nullptr : &parts_.added[found->second];
}

std::string BpeTokenizer::token_bytes(TokenId id, bool special) const {
  check_id(id);
  const uint32_t index = static_cast<uint32_t>(id);
  if (const AddedToken* added = added_token(index))
    return added->special && !special ? std::string() : added->content;
  return parts_.tokens.has(index) ? piece_bytes(index) : std::string();
}

std::optional<TokenId> BpeTokenizer::find(std::string_view token) const {
  const auto added = added_by_content_.find(std::string(token));
  if (added != added_by_content_.end()) return static_cast<TokenId>(added->second);
  if (const std::optional<uint32_t> id = parts_.tokens.find(token)) return static_cast<TokenId>(*id);
  return std::nullopt;
}

bool BpeTokenizer::is_special(TokenId id) const {
  const AddedToken* added = id < 0 ? nullptr : added_token(static_cast<uint32_t>(id));
  return added != nullptr && added->special;
}

void append_unknown(std::vector<uint32_t>& symbols, uint32_t unk, bool fuse) {
  if (!fuse || symbols.empty() || symbols.back() != unk) symbols.push_back(unk);
}

void add_known_end_tokens(TokenizerParts& parts) {
  static constexpr std::array<std::string_view, 8> kNames = {"<|eot_id|>", "<|eom_id|>",    "<|end_of_text|>",
                                                             "<|im_end|>", "<|endoftext|>", "<|return|>",
                                                             "<|call|>",   "</s>"};
  for (const AddedToken& token : parts.added) {
    if (!token.special || std::find(kNames.begin(), kNames.end(), token.content) == kNames.end()) continue;
    const TokenId id = static_cast<TokenId>(token.id);
    if (std::find(parts.ends.begin(), parts.ends.end(), id) == parts.ends.end()) parts.ends.push_back(id);
  }
}

}  // namespace millrace
