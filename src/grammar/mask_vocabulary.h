// The tokens of a model for masking: a trie of their bytes in the order a traversal visits it, and ready
// masks of the tokens that any JSON string may hold anywhere.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "grammar/background.h"

namespace millrace::grammar {

// Nodes in preorder: a node's children follow it, its subtree ends at `end`. Node 0 is the root.
struct TrieNode {
  uint32_t end = 0;
  int32_t token = -1;  // the lowest with these bytes
  uint16_t depth = 0;
  uint8_t byte = 0;
  bool has_same = false;  // more tokens have these bytes: Vocabulary::next_same
};

class Vocabulary {
 public:
  explicit Vocabulary(const std::vector<std::string>& bytes);

  size_t num_tokens() const { return next_same_.size(); }
  size_t num_words() const { return (num_tokens() + 63) / 64; }
  size_t longest_token() const { return longest_token_; }  // in bytes
  std::span<const TrieNode> all() const { return all_; }
  std::span<const TrieNode> not_plain() const { return not_plain_; }    // without the plain tokens
  int32_t next_same(int32_t token) const { return next_same_[token]; }  // -1: no more with its bytes
  std::string_view bytes_of(int32_t token) const {
    return {bytes_.data() + first_byte_[token], first_byte_[token + 1] - first_byte_[token]};
  }

  int32_t token_of(uint8_t byte) const { return token_of_[byte]; }  // this byte and no more; -1: none

  // Plain tokens are whole characters, none of which a JSON string would escape, nor a line separator that a
  // pattern's dot refuses. Sets the bits of those with at most `characters` of them.
  void add_plain(uint32_t characters, std::span<uint64_t> mask) const;
  uint32_t longest_plain() const { return longest_plain_; }  // characters of the longest plain token

  // For masks computed ahead of being asked for. What is posted must not own this vocabulary.
  Background& background() const { return background_; }

 private:
  // Masks for so few characters are kept whole; a longer limit adds the tokens in between one by one.
  static constexpr uint32_t kKeptLengths = 16;

  void keep_bytes(const std::vector<std::string>& bytes);
  // Of the tokens of `order`, which is that of their bytes; without the plain ones, of `characters`, if these
  // are named.
  std::vector<TrieNode> trie_of(std::span<const int32_t> order, std::span<const uint32_t> characters);
  // characters [tokens]: of a plain token, else 0.
  void keep_plain(std::span<const int32_t> order, std::span<const uint32_t> characters);

  std::string bytes_;
  std::vector<uint32_t> first_byte_;
  std::vector<int32_t> next_same_;
  std::array<int32_t, 256> token_of_;
  std::vector<TrieNode> all_, not_plain_;
  std::vector<std::vector<uint64_t>> plain_masks_;  // [min(characters, kKeptLengths + 1)]
  struct LongToken {
    uint32_t characters = 0;
    int32_t token = 0;
  };
  uint32_t longest_plain_ = 0;
  size_t longest_token_ = 0;
  std::vector<LongToken> long_plain_;  // more than kKeptLengths characters, by length
  mutable Background background_;      // last: its thread reads all of the above
};

}  // namespace millrace::grammar
