// BpeTokenizer: what byte-level BPE and SentencePiece have in common. Added tokens cut the text, the rest is
// normalized and cut into words by the derived class, and words become ids here, through the vocabulary
// itself, a cache that lives as long as one call, or the merging.
#pragma once

#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

// What both file formats are read into.
struct TokenizerParts {
  std::string source;  // for messages
  TokenTable tokens;   // byte-level: real bytes; SentencePiece: the piece as written, with U+2581 for a space
  MergeTable merges;
  std::vector<AddedToken> added;
  std::vector<TokenId> prefix, suffix;  // what add_special puts around a text
  std::optional<TokenId> bos;
  std::vector<TokenId> ends;
  std::optional<uint32_t> unk;
  bool fuse_unk = false;       // neighbouring unknowns become one
  bool ignore_merges = false;  // a word that is a token is that token, whatever the merges say
};

class BpeTokenizer : public Tokenizer {
 public:
  using Tokenizer::encode;
  std::vector<TokenId> encode(std::string_view text, EncodeOptions options) const final;
  size_t min_tokens(std::string_view text) const final;
  std::string token_bytes(TokenId id, bool special) const final;
  int32_t vocab_size() const final { return vocab_size_; }
  std::optional<TokenId> find(std::string_view token) const final;
  bool is_special(TokenId id) const final;
  std::optional<TokenId> bos() const final { return parts_.bos; }
  std::vector<TokenId> end_tokens() const final { return parts_.ends; }

 protected:
  // Everything one call of encode owns.
  struct EncodeState {
    std::vector<TokenId> out;
    size_t max_tokens = std::numeric_limits<size_t>::max();
    MergeScratch scratch;
    struct CachedWord {
      const char* text = nullptr;
      uint64_t hash = 0;
      uint32_t length = 0;
      uint32_t num_ids = 0;
      size_t out_begin = 0;     // where `out` has the ids already
      uint64_t generation = 0;  // of the state when it was written
    };
    uint64_t generation = 1;  // counts up when ids are taken out of `out`, which makes all cached words void
    std::vector<CachedWord> cache;                   // direct mapped, a power of two
    std::vector<std::unique_ptr<std::string>> kept;  // normalized texts, which cached words point into
  };

  explicit BpeTokenizer(TokenizerParts parts);
  // Derived constructors call this last: it asks normalize().
  void index_added_tokens();

  // The normalized text: `text` itself, or one kept in the state.
  virtual std::string_view normalize(std::string_view text, EncodeState& state) const = 0;
  // Cuts a normalized text into words and gives each to encode_word. at_start: nothing stands before the
  // text.
  virtual void encode_text(std::string_view text, bool at_start, EncodeState& state) const = 0;
  // The symbols merging starts from.
  virtual void start_symbols(std::string_view word, std::vector<uint32_t>& symbols) const = 0;
  virtual void emit(uint32_t symbol, std::vector<TokenId>& out) const {
    out.push_back(static_cast<TokenId>(symbol));
  }
  virtual std::string piece_bytes(uint32_t id) const { return std::string(parts_.tokens.bytes(id)); }

  // For min_tokens: how many bytes of text may become one byte of what is encoded, whether any may become
  // nothing, and whether this one may.
  virtual size_t shrinks() const { return 1; }
  virtual bool drops_text() const { return false; }
  virtual bool drops_byte(uint8_t /*byte*/) const { return false; }

  // An added token's content as decoding shows it.
  virtual std::string shown(std::string content) const { return content; }

  void encode_word(std::string_view word, EncodeState& state) const;
  const AddedToken* added_token(uint32_t id) const;
  void check_id(TokenId id) const;  // throws Error{kBadInput}

  TokenizerParts parts_;

 private:
  struct Enough {};  // thrown when more than max_tokens have come out

  std::string_view enough_of(std::string_view text, size_t max_tokens) const;
  void encode_all(std::string_view text, EncodeOptions options, EncodeState& state) const;
  void merge_word(std::string_view word, EncodeState& state) const;
  void find_longest();

  int32_t vocab_size_ = 0;
  AddedTokenMatcher raw_matcher_, normalized_matcher_;
  std::unordered_map<uint32_t, size_t> added_by_id_;
  std::unordered_map<std::string, uint32_t> added_by_content_;
  // Per token: 0 not known yet, kDirect merging its bytes gives the token itself, kIndirect it does not.
  // Written by whoever finds out; every writer writes the same.
  std::unique_ptr<std::atomic<uint8_t>[]> reach_;
  // [byte] 1 / the bytes of the longest token that has it; 0 where a token may stand for any number of them.
  std::array<float, 256> share_of_byte_{};
};

// Appends one unknown token's id unless fuse and the last is one already.
void append_unknown(std::vector<uint32_t>& symbols, uint32_t unk, bool fuse);

// Names that end a generation wherever they are special tokens; for files that give only one of them.
void add_known_end_tokens(TokenizerParts& parts);

}  // namespace millrace
