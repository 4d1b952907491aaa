#include "grammar/mask_vocabulary.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/utf8.h"
#include "grammar/automaton.h"
#include "grammar/grammar.h"

namespace millrace::grammar {
namespace {

constexpr size_t kMaxTokenBytes = 65535;  // the depth of a trie node

// Characters of a plain token, 0 for any other.
uint32_t plain_characters(std::string_view text) {
  uint32_t count = 0;
  for (size_t length = 0; !text.empty(); text.remove_prefix(length), ++count) {
    length = utf8_sequence_length(text);
    if (length == 0) return 0;
    const uint32_t codepoint = decode_valid_utf8(text.data(), length);
    if (codepoint < 0x80 ? !is_plain(codepoint) : is_line_separator(codepoint)) return 0;
  }
  return count;
}

}  // namespace

Vocabulary::Vocabulary(const std::vector<std::string>& bytes) : next_same_(bytes.size(), -1) {
  keep_bytes(bytes);
  token_of_.fill(-1);
  std::vector<int32_t> order;
  std::vector<uint32_t> characters(bytes.size(), 0);
  for (int32_t t = 0; t < static_cast<int32_t>(bytes.size()); ++t) {
    if (bytes[t].empty()) continue;
    order.push_back(t);
    int32_t& single = token_of_[static_cast<uint8_t>(bytes[t][0])];
    if (bytes[t].size() == 1 && single < 0) single = t;
    characters[t] = plain_characters(bytes[t]);
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const int compared = bytes[a].compare(bytes[b]);
    return compared != 0 ? compared < 0 : a < b;
  });
  all_ = trie_of(order, {});
  not_plain_ = trie_of(order, characters);
  keep_plain(order, characters);
}

void Vocabulary::keep_bytes(const std::vector<std::string>& bytes) {
  first_byte_.reserve(bytes.size() + 1);
  for (const std::string& token : bytes) {
    if (token.size() > kMaxTokenBytes)
      throw_error(ErrorCode::kUnsupported, "vocabulary: token {} has {} bytes, at most {} are supported",
                  first_byte_.size(), token.size(), kMaxTokenBytes);
    first_byte_.push_back(static_cast<uint32_t>(bytes_.size()));
    longest_token_ = std::max(longest_token_, token.size());
    bytes_ += token;
  }
  first_byte_.push_back(static_cast<uint32_t>(bytes_.size()));
}

// A node's subtree ends where a token leaves its path.
std::vector<TrieNode> Vocabulary::trie_of(std::span<const int32_t> order,
                                          std::span<const uint32_t> characters) {
  std::vector<TrieNode> trie(1);
  std::vector<uint32_t> path = {0};  // node at each depth
  std::string_view previous;
  for (const int32_t t : order) {
    if (!characters.empty() && characters[t] != 0) continue;
    const std::string_view text = bytes_of(t);
    const size_t common = static_cast<size_t>(
        std::mismatch(text.begin(), text.end(), previous.begin(), previous.end()).first - text.begin());
    while (path.size() > common + 1) {
      trie[path.back()].end = static_cast<uint32_t>(trie.size());
      path.pop_back();
    }
    for (size_t i = common; i < text.size(); ++i) {
      path.push_back(static_cast<uint32_t>(trie.size()));
      trie.push_back({0, -1, static_cast<uint16_t>(i + 1), static_cast<uint8_t>(text[i]), false});
    }
    TrieNode& node = trie[path.back()];
    node.has_same = node.token >= 0;
    if (node.token < 0) {
      node.token = t;
    } else if (characters.empty()) {  // the chain of equals is the same in both tries
      int32_t last = node.token;
      while (next_same_[last] >= 0) last = next_same_[last];
      next_same_[last] = t;
    }
    previous = text;
  }
  for (const uint32_t node : path) trie[node].end = static_cast<uint32_t>(trie.size());
  return trie;
}

void Vocabulary::keep_plain(std::span<const int32_t> order, std::span<const uint32_t> characters) {
  plain_masks_.assign(kKeptLengths + 2, std::vector<uint64_t>(num_words(), 0));
  for (const int32_t t : order) {
    if (characters[t] == 0) continue;
    longest_plain_ = std::max(longest_plain_, characters[t]);
    for (uint32_t k = std::min(characters[t], kKeptLengths + 1); k <= kKeptLengths + 1; ++k) {
      plain_masks_[k][t / 64] |= uint64_t{1} << (t % 64);
    }
    if (characters[t] > kKeptLengths) long_plain_.push_back({characters[t], t});
  }
  std::sort(long_plain_.begin(), long_plain_.end(),
            [](const LongToken& a, const LongToken& b) { return a.characters < b.characters; });
}

void Vocabulary::add_plain(uint32_t characters, std::span<uint64_t> mask) const {
  const bool is_all = characters >= longest_plain_;
  const std::vector<uint64_t>& whole =
      plain_masks_[is_all ? kKeptLengths + 1 : std::min(characters, kKeptLengths)];
  for (size_t i = 0; i < whole.size(); ++i) mask[i] |= whole[i];
  if (is_all) return;
  for (const LongToken& token : long_plain_) {
    if (token.characters > characters) break;
    mask[token.token / 64] |= uint64_t{1} << (token.token % 64);
  }
}

std::shared_ptr<const Vocabulary> make_vocabulary(const std::vector<std::string>& bytes) {
  return std::make_shared<const Vocabulary>(bytes);
}

}  // namespace millrace::grammar
