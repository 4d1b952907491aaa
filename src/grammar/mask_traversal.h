// Traverses a trie of tokens through the automaton, from one state on a stack of which nothing is known. Sets
// of configurations are numbered as they are met and their steps remembered: in the middle of a string, a
// hundred thousand trie nodes cost one table lookup each.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "grammar/automaton.h"
#include "grammar/mask_cache.h"
#include "grammar/mask_vocabulary.h"
#include "grammar/stacks.h"

namespace millrace::grammar {

class MaskTraversal {
 public:
  MaskTraversal(const Automaton& automaton, const Vocabulary& vocabulary);
  // Tokens from their first byte on.
  MaskEntry from_state(StateId state);
  // Tokens from the places on where the entry above left its rule, which returns to `state`.
  MaskEntry from_exits(StateId state, const MaskEntry& above);

 private:
  static constexpr int32_t kUnknown = -1, kDead = 0;  // set 0 is the dead one
  int32_t start(StateId state);
  int32_t number_of(ConfigSet& set);
  int32_t step(int32_t set, uint8_t byte) {
    const int32_t known = next_[static_cast<size_t>(set) * 256 + byte];
    return known != kUnknown ? known : compute_step(set, byte);
  }
  int32_t compute_step(int32_t set, uint8_t byte);
  bool may_go_on(std::span<const TrieNode> trie, uint32_t node) const;
  void traverse(std::span<const TrieNode> trie, uint32_t node, int32_t set);
  void take(const TrieNode& node);
  MaskEntry finish(MaskEntry entry);

  const Automaton& automaton_;
  const Vocabulary& vocabulary_;
  Stacks stacks_;
  Stepper stepper_;
  std::vector<int32_t> next_;                  // [set][byte]
  std::vector<uint8_t> ends_;                  // [set]
  std::vector<std::vector<Config>> expanded_;  // [set]
  std::map<std::vector<Config>, int32_t> number_of_;
  ConfigSet scratch_;
  ByteSet follow_;  // what may come after the rule of the first state
  bool has_follow_ = false;
  std::vector<int32_t> path_;    // set at each depth
  std::vector<uint64_t> found_;  // mask of tokens
  std::vector<uint32_t> exits_;
};

}  // namespace millrace::grammar
